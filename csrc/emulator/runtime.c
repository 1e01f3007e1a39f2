/* The stand-in for the CuTe DSL's CUDA runtime library (libcute_dsl_runtime.so).
 *
 * The DSL's jitted host code reaches CUDA only through the functions below. All of them report success and do nothing,
 * save for those that hand over an image, a kernel's name or a launch: these call back into cute_emulator. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t (*load_callback)(void *image);
typedef int64_t (*kernel_callback)(int64_t library, const char *name);
typedef int (*launch_callback)(void *config, int64_t kernel, void **arguments);
static load_callback on_load;
static kernel_callback on_kernel;
static launch_callback on_launch;

void emu_set_callbacks(load_callback load, kernel_callback kernel, launch_callback launch) {
    on_load = load;
    on_kernel = kernel;
    on_launch = launch;
}

#define SUCCEEDS(name) int name(void) { return 0; }
SUCCEEDS(_cuDeviceGet)
SUCCEEDS(_cuKernelGetAttribute)
SUCCEEDS(_cuLibraryGetGlobal)
SUCCEEDS(_cuLibraryGetKernelCount)
SUCCEEDS(_cuLibraryGetManaged)
SUCCEEDS(_cuLibraryGetModule)
SUCCEEDS(_cuLibraryGetUnifiedFunction)
SUCCEEDS(_cuLibraryLoadFromFile)
SUCCEEDS(_cuLibraryUnload)
SUCCEEDS(_cudaDeviceGetAttribute)
SUCCEEDS(_cudaDeviceSynchronize)
SUCCEEDS(_cudaEventCreate)
SUCCEEDS(_cudaEventDestroy)
SUCCEEDS(_cudaEventElapsedTime)
SUCCEEDS(_cudaEventRecord)
SUCCEEDS(_cudaFuncSetAttribute)
SUCCEEDS(_cudaGetDeviceProperties)
SUCCEEDS(_cudaGraphDestroy)
SUCCEEDS(_cudaGraphExecDestroy)
SUCCEEDS(_cudaGraphInstantiate)
SUCCEEDS(_cudaGraphLaunch)
SUCCEEDS(_cudaKernelSetAttributeForDevice)
SUCCEEDS(_cudaLibraryGetGlobal)
SUCCEEDS(_cudaLibraryGetKernelCount)
SUCCEEDS(_cudaLibraryGetManaged)
SUCCEEDS(_cudaLibraryGetUnifiedFunction)
SUCCEEDS(_cudaLibraryLoadFromFile)
SUCCEEDS(_cudaLibraryUnload)
SUCCEEDS(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEEDS(_cudaProfilerStart)
SUCCEEDS(_cudaProfilerStop)
SUCCEEDS(_cudaSetDevice)
SUCCEEDS(_cudaStreamAddCallback)
SUCCEEDS(_cudaStreamBeginCapture)
SUCCEEDS(_cudaStreamCreate)
SUCCEEDS(_cudaStreamDestroy)
SUCCEEDS(_cudaStreamEndCapture)
SUCCEEDS(_cudaStreamSynchronize)
SUCCEEDS(_cudaStreamWaitEvent)

int _cudaGetDevice(int *device) {
    if (device) *device = 0;
    return 0;
}
int _cudaGetDeviceCount(int *n) {
    *n = 1;
    return 0;
}
int _cudaMemset(void *p, int value, size_t n) {
    memset(p, value, n);
    return 0;
}
int _cudaMemsetAsync(void *p, int value, size_t n, void *stream) {
    (void)stream;
    memset(p, value, n);
    return 0;
}
int _cudaMemcpy(void *to, const void *from, size_t n, int kind) {
    (void)kind;
    memmove(to, from, n);
    return 0;
}
int _cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    (void)kind, (void)stream;
    memmove(to, from, n);
    return 0;
}
static int allocate(void **p, size_t n) { return (*p = aligned_alloc(256, (n + 255) / 256 * 256)) ? 0 : 2; }
int _cudaMalloc(void **p, size_t n) { return allocate(p, n); }
int _cudaMallocAsync(void **p, size_t n, void *stream) { return (void)stream, allocate(p, n); }
int _cudaMallocHost(void **p, size_t n) { return allocate(p, n); }
int _cudaMallocManaged(void **p, size_t n, unsigned flags) { return (void)flags, allocate(p, n); }
int _cudaFree(void *p) { return free(p), 0; }
int _cudaFreeAsync(void *p, void *stream) { return (void)stream, free(p), 0; }
int _cudaFreeHost(void *p) { return free(p), 0; }

/* cuTensorMapEncodeTiled, in the format that tensor_map.cpp reads. 1: invalid value, 801: not supported. */
int _cuTensorMapEncodeTiled(uint32_t *map, unsigned type, unsigned rank, void *address, const uint64_t *size, const uint64_t *stride,
                            const uint32_t *box, const uint32_t *step, unsigned interleave, unsigned swizzle, unsigned promotion,
                            unsigned fill) {
    static const uint8_t hardware_type[13] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8};
    (void)promotion;
    if (type > 12 || interleave || fill || swizzle > 4) return 801;
    if (rank < 1 || rank > 5 || (uint64_t)address % 16) return 1;
    memset(map, 0, 128);
    map[0] = (uint32_t)(uint64_t)address;
    map[1] = (uint32_t)((uint64_t)address >> 32);
    map[2] = (rank - 1) << 4 | (uint32_t)hardware_type[type] << 7 | (swizzle == 4 ? 3 : swizzle) << 13 | (type > 10 ? 1u << 16 : 0) |
             (swizzle == 4 ? 1u << 19 : 0);
    for (unsigned i = 0; i < rank; i++) {
        if (!size[i] || size[i] > (1ull << 32) || !box[i] || box[i] > 256 || (step && step[i] != 1)) return step && step[i] != 1 ? 801 : 1;
        map[8 + i] = (uint32_t)(size[i] - 1);
        if (i == 0) map[13] |= (box[0] - 1) << 24;
        else map[14] |= (box[i] - 1) << (8 * (i - 1));
        if (i + 1 < rank) {
            if (stride[i] % 16) return 1;
            map[3 + i] = (uint32_t)(stride[i] >> 4);
            map[7] |= (uint32_t)(stride[i] >> 36 & 15) << (4 * i);
        }
    }
    return 0;
}

static int load_image(void **library, void *image) {
    int64_t handle = on_load ? on_load(image) : 0;
    if (handle <= 0) return 200; /* invalid image */
    *library = (void *)handle;
    return 0;
}
int _cudaLibraryLoadData(void **library, void *image) { return load_image(library, image); }
int _cuLibraryLoadData(void **library, void *image) { return load_image(library, image); }
static int find_kernel(void **kernel, void *library, const char *name) {
    int64_t handle = on_kernel ? on_kernel((int64_t)library, name) : 0;
    if (handle <= 0) return 500; /* symbol not found */
    *kernel = (void *)handle;
    return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return find_kernel(kernel, library, name); }
int _cuLibraryGetKernel(void **kernel, void *library, const char *name) { return find_kernel(kernel, library, name); }

int _cudaLaunchKernelEx(void *config, void *kernel, void **arguments) {
    return on_launch ? on_launch(config, (int64_t)kernel, arguments) : 98; /* invalid device function */
}
int _cudaLaunchKernel(void) { return 801; }

/* tvm-ffi entry points */
int cuda_dialect_init_library_once(void **state, int (*init)(void *), int (*load)(void *, int), void (*set_error)(const char *, const char *)) {
    if (*state) return 0;
    void *library = 0;
    if (init(&library)) {
        set_error("RuntimeError", "cute_emulator: loading the kernel image failed");
        return -1;
    }
    if (load && load(&library, 0)) {
        set_error("RuntimeError", "cute_emulator: loading the kernels failed");
        return -1;
    }
    *state = library;
    return 0;
}
void cuda_dialect_unload_library_once(void **state) { *state = 0; }
const char *cuda_dialect_get_error_name(int code) { return (void)code, "emulated CUDA error"; }
void cuda_dialect_print_on_error(int code) {
    if (code) fprintf(stderr, "cute_emulator: emulated CUDA error %d\n", code);
}
void cuda_dialect_assert_success(int code) { cuda_dialect_print_on_error(code); }
const char *CuteDSLRT_GetErrorName(int code) { return (void)code, "emulated CUDA error"; }
const char *CuteDSLRT_GetErrorString(int code) { return (void)code, "see the emulator's report"; }
static void raise_error(void (*set)(const char *, const char **, int), const char *what) {
    const char *parts[1] = {what};
    set("RuntimeError", parts, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set)(const char *, const char **, int), int code) { (void)code, raise_error(set, "emulated CUDA error"); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void (*set)(const char *, const char **, int), int code) { (void)code, raise_error(set, "emulated CUDA launch error"); }
