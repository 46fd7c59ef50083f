/* The instruction set to use on this machine: the widest of those the library was compiled for. */
#include "kernels.h"

__attribute__((visibility("default"))) int zf_version(void) { return ZF_VERSION; }

/* Names from the best to the plainest, a space between; every one of them runs here. */
__attribute__((visibility("default"))) const char *zf_isas(void) {
#if defined(ZF_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        return wide ? "avx512 avx2 plain" : "avx2 plain";
    }
#endif
    return "plain";
}
