/* Shows one GPU as two devices, gpu(0) and gpu(1), to run code for two GPUs on a machine with one. It changes nothing on
   a machine with more GPUs. Both devices share the GPU's memory and its time, so two are no faster than one.

   cc -shared -fPIC -o build/two_devices.so tests/two_devices.c -ldl
   LD_PRELOAD=$PWD/build/two_devices.so python scripts/train.py --gpus 2 --device gpu */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

static void *own(const char *library, const char *name) {  /* NVIDIA's function */
  void *handle = dlopen(library, RTLD_LAZY);
  return dlsym(handle ? handle : RTLD_NEXT, name);
}
#define CUDA(name, ...) ({ static int (*f)(__VA_ARGS__); if (!f) f = own("libcudart.so.11.0", #name); f; })

static __thread int current;

static int alone(void) {  /* whether the machine has exactly one GPU */
  static int gpus;
  if (!gpus) CUDA(cudaGetDeviceCount, int *)(&gpus);
  return gpus == 1;
}
static int real(int device) { return alone() ? 0 : device; }

int cudaGetDeviceCount(int *count) {
  int status = CUDA(cudaGetDeviceCount, int *)(count);
  if (!status && *count == 1) *count = 2;
  return status;
}
int cudaSetDevice(int device) {
  if (alone() && device > 1) return 101;  /* cudaErrorInvalidDevice */
  current = device;
  return CUDA(cudaSetDevice, int)(real(device));
}
int cudaGetDevice(int *device) {
  int status = CUDA(cudaGetDevice, int *)(device);
  if (alone()) *device = current;
  return status;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return CUDA(cudaDeviceGetAttribute, int *, int, int)(value, attribute, real(device));
}
int cudaGetDeviceProperties(void *properties, int device) {
  return CUDA(cudaGetDeviceProperties, void *, int)(properties, real(device));
}
int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  if (!alone()) return CUDA(cudaDeviceCanAccessPeer, int *, int, int)(can, device, peer);
  *can = device != peer;
  return 0;
}
int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return alone() ? 0 : CUDA(cudaDeviceEnablePeerAccess, int, unsigned)(peer, flags);
}
int cudaMemcpyPeerAsync(void *to, int at, const void *from, int its, size_t size, void *stream) {
  if (alone()) return CUDA(cudaMemcpyAsync, void *, const void *, size_t, int, void *)(to, from, size, 3, stream);
  return CUDA(cudaMemcpyPeerAsync, void *, int, const void *, int, size_t, void *)(to, at, from, its, size, stream);
}
int cuDeviceGet(int *handle, int device) {  /* of the driver; MXNet asks for it when it compiles an operator */
  int (*get)(int *, int) = own("libcuda.so.1", "cuDeviceGet");
  return get(handle, real(device));
}
