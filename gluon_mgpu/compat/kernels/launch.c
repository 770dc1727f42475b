/* Gives libmxnet.so the kernels that build.py compiled, instead of those inside it.

   libmxnet.so registers and launches its kernels through libcudart.so.11.0. Python opens this library before that one,
   so libmxnet.so finds the functions below here, and all others in NVIDIA's library. They keep the names of its
   kernels, and give NVIDIA's library a module of ours, under the same names, when its first kernel is launched.

   The file kernels.h, which build.py writes, defines MODULES, `modules` (the compiled modules), KERNELS, and `kernels`
   (the kernels' names, sorted, and their modules). Names that begin with __cuda are from NVIDIA's crt/host_runtime.h,
   and are the same since CUDA 10.1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *name; int module; } Kernel;
#include "kernels.h"

typedef struct { unsigned x, y, z; } Dim;
typedef struct { int magic, version; const void *data; void *unused; } FatBinary;
typedef struct { const void *host; const char *name; int module, reported; } Entry;

enum { SLOTS = 1 << 19, OK = 0, NO_KERNEL = 209 /* cudaErrorNoKernelImageForDevice */ };
static Entry table[SLOTS];  /* by address of the host function that stands for the kernel */
static int used, loaded[MODULES + 1];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *real(const char *name) {
  void *library = dlopen("libcudart.so.11.0", RTLD_LAZY), *function = library ? dlsym(library, name) : NULL;
  if (!function) { fprintf(stderr, "%s\n", dlerror()); abort(); }
  return function;
}
#define CALL(name, ...) ({ static int (*f)(__VA_ARGS__); if (!f) f = real(name); f; })

static Entry *find(const void *host) {
  size_t i = ((uintptr_t)host >> 4) * 0x9E3779B97F4A7C15ull >> 45;  /* 64 - 45 = 19 bits */
  while (table[i].host && table[i].host != host) i = (i + 1) % SLOTS;
  return &table[i];
}

static int compare(const void *name, const void *kernel) { return strcmp(name, ((const Kernel *)kernel)->name); }

void **__cudaRegisterFatBinary(void *binary) { static void *none[1]; return none; }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
char __cudaInitModule(void **binary) { return 1; }
void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int ext, size_t size, int constant,
                       int global) {}

void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, Dim *block, Dim *grid, int *size) {
  pthread_mutex_lock(&lock);
  Entry *entry = find(host);
  if (!entry->host) {
    if (++used == SLOTS) { fprintf(stderr, "more than %d kernels\n", SLOTS); abort(); }
    Kernel *kernel = bsearch(name, kernels, KERNELS, sizeof *kernels, compare);
    *entry = (Entry){host, name, kernel ? kernel->module : -1, 0};
  }
  pthread_mutex_unlock(&lock);
}

/* Registers the kernels of a module, as if libmxnet.so had been loaded only now. */
static void load(int module) {
  FatBinary *binary = calloc(1, sizeof *binary);
  *binary = (FatBinary){0x466243b1, 1, modules[module], NULL};
  void **handle = ((void **(*)(void *))real("__cudaRegisterFatBinary"))(binary);
  void (*add)(void **, const void *, const char *, const char *, int, void *, void *, void *, void *, void *) =
      real("__cudaRegisterFunction");
  for (Entry *entry = table; entry < table + SLOTS; entry++)
    if (entry->host && entry->module == module)
      add(handle, entry->host, entry->name, entry->name, -1, NULL, NULL, NULL, NULL, NULL);
  ((void (*)(void **))real("__cudaRegisterFatBinaryEnd"))(handle);
  loaded[module] = 1;
}

/* Adds a kernel's name to missing.txt beside this library, for build.py, and says so. */
static void report(Entry *entry) {
  char path[4096];
  Dl_info own;
  if (entry->reported++ || !dladdr(table, &own)) return;
  snprintf(path, sizeof path, "%.*s/missing.txt", (int)(strrchr(own.dli_fname, '/') - own.dli_fname), own.dli_fname);
  FILE *file = fopen(path, "a");
  if (file) { fprintf(file, "%s\n", entry->name); fclose(file); }
  void *library = dlopen("libstdc++.so.6", RTLD_LAZY);
  char *(*demangle)(const char *, char *, size_t *, int *) = library ? dlsym(library, "__cxa_demangle") : NULL;
  char *declaration = demangle ? demangle(entry->name, NULL, NULL, NULL) : NULL;
  fprintf(stderr, "this GPU needs MXNet's kernel %.200s: %s, and start again\n", declaration ? declaration : entry->name,
          COMMAND);
  free(declaration);
}

static int ready(const void *host) {
  pthread_mutex_lock(&lock);
  Entry *entry = find(host);
  int found = entry->host && entry->module >= 0;
  if (found && !loaded[entry->module]) load(entry->module);
  if (!found && entry->host) report(entry);
  pthread_mutex_unlock(&lock);
  return found;
}

static __thread int last;  /* what cudaGetLastError and cudaPeekAtLastError return next, if a kernel was missing */

int cudaLaunchKernel(const void *host, Dim grid, Dim block, void **arguments, size_t shared, void *stream) {
  if (!ready(host)) return last = NO_KERNEL;
  return CALL("cudaLaunchKernel", const void *, Dim, Dim, void **, size_t, void *)(host, grid, block, arguments, shared,
                                                                                stream);
}
int cudaFuncGetAttributes(void *attributes, const void *host) {
  return ready(host) ? CALL("cudaFuncGetAttributes", void *, const void *)(attributes, host) : (last = NO_KERNEL);
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads, size_t shared,
                                                           unsigned flags) {
  if (!ready(host)) return last = NO_KERNEL;
  return CALL("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", int *, const void *, int, size_t,
              unsigned)(blocks, host, threads, shared, flags);
}
static int ours_or(int theirs) {
  int ours = last;
  last = OK;
  return ours ? ours : theirs;
}
int cudaGetLastError(void) { return ours_or(CALL("cudaGetLastError", void)()); }
int cudaPeekAtLastError(void) { return ours_or(CALL("cudaPeekAtLastError", void)()); }
