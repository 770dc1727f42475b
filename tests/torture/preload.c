/* Preloaded into a run. Calls on files whose path contains TORTURE_PATH fail with errno TORTURE_ERRNO, from call number
   TORTURE_FIRST on, TORTURE_COUNT times, or take TORTURE_DELAY microseconds. The time of day jumps by TORTURE_JUMP
   seconds and back, every second. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

int usleep(unsigned);
ssize_t readlink(const char *, char *, size_t);
static const char *part;
static long error, first, count, delay, jump, calls;

static long number(const char *name) { return getenv(name) ? atol(getenv(name)) : 0; }

__attribute__((constructor)) static void start(void) {
    error = number("TORTURE_ERRNO"), first = number("TORTURE_FIRST"), count = number("TORTURE_COUNT");
    delay = number("TORTURE_DELAY"), jump = number("TORTURE_JUMP"), part = getenv("TORTURE_PATH");
}

static int fails(const char *path) {
    if (!part || !strstr(path, part)) return 0;
    if (delay) usleep(delay);
    long call = __sync_add_and_fetch(&calls, 1);
    if (!error || call < first || call >= first + count) return 0;
    errno = error;
    return 1;
}

static int fails_at(int fd) {
    char link[32], path[4096] = "";
    if (!part) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && fails(path);
}

#define WRAP(type, name, parameters, arguments, failing)                       \
    type name parameters {                                                     \
        static type(*real) parameters;                                         \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);         \
        return (failing) ? -1 : real arguments;                                \
    }

WRAP(int, open, (const char *path, int flags, mode_t mode), (path, flags, mode), fails(path))
WRAP(int, open64, (const char *path, int flags, mode_t mode), (path, flags, mode), fails(path))
WRAP(ssize_t, read, (int fd, void *data, size_t n), (fd, data, n), fails_at(fd))
WRAP(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n), fails_at(fd))
WRAP(int, fsync, (int fd), (fd), fails_at(fd))
WRAP(int, rename, (const char *from, const char *to), (from, to), fails(to))
WRAP(int, unlink, (const char *path), (path), fails(path))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), fails(path))
WRAP(int, flock, (int fd, int operation), (fd, operation), fails_at(fd))

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (id == CLOCK_REALTIME && now->tv_sec % 2) now->tv_sec += jump;
    return status;
}
