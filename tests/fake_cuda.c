/* Stands in for NVIDIA's driver and libraries, without a GPU: memory is the host's, and kernels and other calculations
   do nothing. FAKE_GPUS is the number of GPUs. A launch succeeds if its kernel was registered with a module that
   libmxnet.so does not contain. fake_cuda.py adds all other functions that libmxnet.so needs: they
   return 0. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Dim;
static int gpus(void) { return getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 1; }

/* the runtime: kernels */
enum { SLOTS = 1 << 12, INVALID_FUNCTION = 98 };
static const void *registered[SLOTS];
static size_t count;
void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 8); }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaRegisterFunction(void **binary, const void *host, char *device, const char *name, int limit, void *tid,
                            void *bid, Dim *block, Dim *grid, int *size) {
  if (count == SLOTS) abort();
  registered[count++] = host;
}
static int known(const void *host) {
  for (size_t i = 0; i < count; i++) if (registered[i] == host) return 0;
  return INVALID_FUNCTION;
}
int cudaLaunchKernel(const void *host, Dim grid, Dim block, void **arguments, size_t shared, void *stream) {
  return !grid.x || !grid.y || !grid.z || !block.x || block.x * block.y * block.z > 1024 ? 9 : known(host);
}
int cudaFuncGetAttributes(int *attributes, const void *host) {  /* struct cudaFuncAttributes of CUDA 11 */
  memset(attributes, 0, 56);
  attributes[6] = 1024;  /* maxThreadsPerBlock */
  attributes[7] = 32;    /* numRegs */
  attributes[8] = attributes[9] = 80;  /* ptxVersion, binaryVersion */
  return known(host);
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads, size_t shared,
                                                           unsigned flags) {
  *blocks = 2;
  return known(host);
}
static __thread struct { Dim grid, block; size_t shared; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void *stream) {
  pushed.grid = grid; pushed.block = block; pushed.shared = shared; pushed.stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared, void **stream) {
  *grid = pushed.grid; *block = pushed.block; *shared = pushed.shared; *stream = pushed.stream;
  return 0;
}

/* the runtime: devices and memory */
static __thread int device;
int cudaGetDeviceCount(int *n) { *n = gpus(); return 0; }
int cudaSetDevice(int i) { device = i; return i < 0 || i >= gpus() ? 101 : 0; }
int cudaGetDevice(int *i) { *i = device; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int i) {
  static const int values[][2] = {{1, 1024}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32}, {16, 132},
                                  {39, 2048}, {75, 9}, {76, 0}, {81, 233472}};  /* of an H100 */
  *value = 1;
  for (size_t k = 0; k < sizeof values / sizeof *values; k++) if (values[k][0] == attribute) *value = values[k][1];
  return 0;
}
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = 8ull << 30; return 0; }
int cudaMalloc(void **p, size_t n) { return (*p = calloc(1, n + 64)) ? 0 : 2; }
int cudaMallocPitch(void **p, size_t *pitch, size_t w, size_t h) { *pitch = w; return cudaMalloc(p, w * h); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { return cudaMalloc(p, n); }
int cudaFree(void *p) { free(p); return 0; }
int cudaFreeHost(void *p) { free(p); return 0; }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { memcpy(to, from, n); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) { memcpy(to, from, n); return 0; }
int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, void *s) { memcpy(to, from, n); return 0; }
int cudaMemcpy2DAsync(char *to, size_t tp, const char *from, size_t fp, size_t w, size_t h, int kind, void *s) {
  for (size_t i = 0; i < h; i++) memcpy(to + i * tp, from + i * fp, w);
  return 0;
}
int cudaMemsetAsync(void *p, int value, size_t n, void *s) { memset(p, value, n); return 0; }
const char *cudaGetErrorString(int e) { return "fake error"; }
const char *cudaGetErrorName(int e) { return "fake error"; }

/* the driver */
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *n) { *n = gpus(); return 0; }
int cuDeviceGet(int *handle, int i) { *handle = i; return 0; }
int cuDeviceGetName(char *name, int n, int i) { snprintf(name, n, "NVIDIA H100"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int i) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuDeviceCanAccessPeer(int *can, int i, int j) { *can = 0; return 0; }

/* Functions that create something, or ask for a number */
#define CREATE(name) int name(void **p) { *p = calloc(1, 64); return 0; }
#define COUNT(name) int name(void *handle, int *n) { *n = 4; return 0; }
CREATE(cudaStreamCreate) CREATE(cudnnCreate) CREATE(cudnnCreateActivationDescriptor) CREATE(cublasCreate_v2)
CREATE(cudnnCreateConvolutionDescriptor) CREATE(cudnnCreateDropoutDescriptor) CREATE(cudnnCreateFilterDescriptor)
CREATE(cudnnCreatePoolingDescriptor) CREATE(cudnnCreateRNNDataDescriptor) CREATE(cudnnCreateRNNDescriptor)
CREATE(cudnnCreateSpatialTransformerDescriptor) CREATE(cudnnCreateTensorDescriptor) CREATE(cusolverDnCreate)
int cudaEventCreateWithFlags(void **p, unsigned flags) { return cudaStreamCreate(p); }
int curandCreateGenerator(void **p, int kind) { return cudaStreamCreate(p); }
COUNT(cudnnGetConvolutionForwardAlgorithmMaxCount) COUNT(cudnnGetConvolutionBackwardDataAlgorithmMaxCount)
COUNT(cudnnGetConvolutionBackwardFilterAlgorithmMaxCount) COUNT(cublasGetMathMode)
typedef struct { int algorithm, status; float time; size_t memory; int determinism, math, reserved[3]; } Choice;
#define CHOOSE(name) int name(void *h, void *a, void *b, void *c, void *d, int wanted, int *n, Choice *choice) { \
  memset(choice, 0, sizeof *choice); choice->algorithm = choice->time = *n = 1; return 0; }
CHOOSE(cudnnGetConvolutionForwardAlgorithm_v7) CHOOSE(cudnnGetConvolutionBackwardDataAlgorithm_v7)
CHOOSE(cudnnGetConvolutionBackwardFilterAlgorithm_v7) CHOOSE(cudnnFindConvolutionForwardAlgorithm)
CHOOSE(cudnnFindConvolutionBackwardDataAlgorithm) CHOOSE(cudnnFindConvolutionBackwardFilterAlgorithm)
#define SIZE(name) int name(void *h, void *a, void *b, void *c, void *d, int algorithm, size_t *n) { *n = 0; return 0; }
SIZE(cudnnGetConvolutionForwardWorkspaceSize) SIZE(cudnnGetConvolutionBackwardDataWorkspaceSize)
SIZE(cudnnGetConvolutionBackwardFilterWorkspaceSize)
int cudnnDropoutGetStatesSize(void *handle, size_t *n) { *n = 1024; return 0; }
int cudnnDropoutGetReserveSpaceSize(void *handle, size_t *n) { *n = 64; return 0; }
size_t cudnnGetVersion(void) { return 8100; }
const char *cudnnGetErrorString(int e) { return "fake"; }
