// What a CUDA kernel needs to be C++: its threads are run one by one, those of a warp as fibers that change at each
// shuffle. The kernels are written after this header, then a function that picks one by its name.
#include <math.h>
#include <string.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

// A GPU refuses an access that is not aligned. This counts them: copies are made by hand, so that the address is seen.
static int num_misaligned;
static void look_at(const void *x, size_t alignment) {
    asm("" : "+r"(x)); // or the compiler takes the alignment for granted
    num_misaligned += (size_t)x % alignment != 0;
}
#define LOOK_AT_COPIES(Type)                                                                                           \
    Type(const Type &other) { *this = other; }                                                                         \
    Type &operator=(const Type &other) {                                                                               \
        look_at(this, alignof(Type)), look_at(&other, alignof(Type));                                                  \
        memcpy((void *)this, (const void *)&other, sizeof other);                                                      \
        return *this;                                                                                                  \
    }

struct alignas(16) uint4 {
    unsigned x, y, z, w;
    uint4(unsigned a, unsigned b, unsigned c, unsigned d) : x(a), y(b), z(c), w(d) {}
    LOOK_AT_COPIES(uint4)
};
struct alignas(8) uint2 {
    unsigned x, y;
    uint2(unsigned a, unsigned b) : x(a), y(b) {}
    LOOK_AT_COPIES(uint2)
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4(x, y, z, w); }
static uint2 make_uint2(unsigned x, unsigned y) { return uint2(x, y); }

struct Place {
    unsigned x;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

static ucontext_t scheduler, fibers[32];
static char stacks[32][1 << 16];
static double shuffled[2][32]; // by turns, so that nobody writes what another is still to read
static unsigned num_shuffles[32];
static bool done[32];
static void (*thread_body)(const void *);
static const void *thread_arguments;

static double __shfl_xor_sync(unsigned, double x, int step) {
    unsigned lane = threadIdx.x % 32, turn = num_shuffles[lane]++ % 2;
    shuffled[turn][lane] = x;
    swapcontext(&fibers[lane], &scheduler);
    return shuffled[turn][lane ^ step];
}
static unsigned __shfl_xor_sync(unsigned lanes, unsigned x, int step) {
    return (unsigned)__shfl_xor_sync(lanes, (double)x, step); // exact
}

static void run_thread() {
    thread_body(thread_arguments);
    done[threadIdx.x % 32] = true;
}

// Whether all threads of the warp came to the same shuffles.
static bool run_warp(unsigned first_thread) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        getcontext(&fibers[lane]);
        fibers[lane].uc_stack.ss_sp = stacks[lane], fibers[lane].uc_stack.ss_size = sizeof stacks[lane];
        fibers[lane].uc_link = &scheduler;
        num_shuffles[lane] = 0, done[lane] = false;
        makecontext(&fibers[lane], run_thread, 0);
    }
    for (unsigned num_done = 0; num_done < 32;) {
        num_done = 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            threadIdx.x = first_thread + lane;
            swapcontext(&scheduler, &fibers[lane]);
            num_done += done[lane];
        }
        if (num_done != 0 && num_done != 32) return false;
    }
    return true;
}

// 0; 1 where arguments are not those of the kernel (kinds: d for a double, i for an integer or an address); 2 where a
// warp came apart at a shuffle; 4 where a wide access was not aligned.
template <class... A, size_t... i>
static int launch(void (*kernel)(A...), std::index_sequence<i...>, const char *kinds, const void *const *arguments,
                  unsigned num_blocks, unsigned num_threads) {
    const bool doubles[] = {std::is_same<A, double>::value...};
    static_assert(((sizeof(A) == 8) && ...), "kernels take 64-bit arguments");
    if (strlen(kinds) != sizeof...(A)) return 1;
    for (size_t k = 0; k < sizeof...(A); ++k)
        if (doubles[k] != (kinds[k] == 'd')) return 1;
    static void (*running)(A...);
    running = kernel;
    thread_body = [](const void *given) { running(*((A *const *)given)[i]...); };
    thread_arguments = arguments;
    blockDim.x = num_threads, gridDim.x = num_blocks, num_misaligned = 0;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x)
        for (unsigned first = 0; first < num_threads; first += 32)
            if (!run_warp(first)) return 2;
    return num_misaligned ? 4 : 0;
}

template <class... A>
static int launch(void (*kernel)(A...), const char *kinds, const void *const *arguments, unsigned num_blocks,
                  unsigned num_threads) {
    return launch(kernel, std::index_sequence_for<A...>(), kinds, arguments, num_blocks, num_threads);
}
