// Vectors and matrix products of a CPU with AVX-512 BF16, by its matrix unit (Intel AMX) where it has one: bf16 operands,
// fp32 sums.
//
// The matrix unit multiplies tiles. A tile is 16 rows of 16 pairs of bf16, 1 KiB; one instruction adds the product of a
// tile of A [16 rows, 32 k] and a tile of B [32 k, 16 columns] to 16 x 16 fp32 of C. The microkernel holds four tiles of
// C, so that each tile it loads is used twice; its block of C is MR x NR and its step along k is KC, as in BLIS.
// Without the unit, vector instructions read the same tiles: one adds the products of a row's pair in A and 16 columns'
// pairs in B to 16 numbers of C. pack.h draws how operands lie in memory.

#pragma once

#include <immintrin.h>
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int64_t MR = 32, NR = 32, KC = 32;  // the microkernel's rows of C, columns of C, and k per step
constexpr int64_t PANEL = 32;                 // rows (or columns) of a packed panel
static_assert(PANEL == MR && PANEL == NR && PANEL == KC, "one panel width serves A, B and k");
constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 1024, TILE_PAIRS = 16;
constexpr int64_t PANEL_STEP = 2 * TILE_BYTES;  // bytes of a panel per KC of k
constexpr int64_t CACHE_LINE = 64;              // bytes: 32 bf16

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t packed_bytes_of(int64_t rows, int64_t K) { return ceil_div(rows, PANEL) * ceil_div(K, PANEL) * PANEL_STEP; }

inline __m512 load16(const uint16_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store16(uint16_t* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline __m512 round16(__m512 x) {
    const __m512i bits = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

// 32 fp32 numbers: the first 16, and the others.
struct Wide {
    __m512 low, high;
};

inline Wide load(const uint16_t* from) { return {load16(from), load16(from + 16)}; }
inline Wide load(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}; }
inline __m512i rounded(Wide x) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.high, x.low)); }
inline void store(void* to, Wide x) { _mm512_storeu_si512(to, rounded(x)); }
inline Wide operator+(Wide a, Wide b) { return {a.low + b.low, a.high + b.high}; }
inline Wide operator-(Wide a, Wide b) { return {a.low - b.low, a.high - b.high}; }
inline Wide operator*(Wide a, Wide b) { return {a.low * b.low, a.high * b.high}; }
inline Wide all(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
inline Wide load_or_zero(const float* from) { return from ? load(from) : all(0); }
inline float sum(Wide x) { return _mm512_reduce_add_ps(x.low + x.high); }

template <class F>
inline Wide each(Wide x, F f) {
    alignas(CACHE_LINE) float numbers[32];
    _mm512_store_ps(numbers, x.low);
    _mm512_store_ps(numbers + 16, x.high);
#pragma omp simd
    for (int i = 0; i < 32; ++i) numbers[i] = f(numbers[i]);
    return load(numbers);
}

// Where packed panels of K columns keep 32 numbers of a row, from column k on.
inline char* packed_at(char* panels, int64_t K, int64_t row, int64_t k) {
    return panels + (row / PANEL * (K / PANEL) + k / PANEL) * PANEL_STEP + row % PANEL / TILE_ROWS * TILE_BYTES + row % TILE_ROWS * CACHE_LINE;
}

// A thread's share of `count` items.
struct Share {
    int64_t begin, end;
};
inline Share share(int64_t count, int64_t thread, int64_t threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

// C [MR, NR] = A B + beta C with one packed panel of A and one of B over `num_steps` steps of KC; beta is 0 or 1, and ldc
// the distance between rows of C in floats. Of C's rows the first `num_rows` are wanted. `prefetch`, if any, is fetched
// into the second cache meanwhile.
//
// By vectors: ROWS rows of C are held in registers at a time, so that 16 sums hide an instruction's latency.
template <int beta>
inline void gemm_microkernel_by_vectors(const char* a_panel, const char* b_panel, int64_t num_steps, float* c,
                                        const char* prefetch, int64_t ldc, int64_t num_rows) {
    constexpr int ROWS = 8;
    const auto pairs = [](const char* from) { return reinterpret_cast<__m512bh>(_mm512_load_si512(from)); };
    for (int64_t row = 0; row < num_rows; row += ROWS, c += ROWS * ldc, prefetch = nullptr) {
        const char* a = a_panel + row / TILE_ROWS * TILE_BYTES + row % TILE_ROWS * CACHE_LINE;
        const char* b = b_panel;
        __m512 left[ROWS], right[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            left[r] = beta ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
            right[r] = beta ? _mm512_loadu_ps(c + r * ldc + TILE_ROWS) : _mm512_setzero_ps();
        }
        for (int64_t s = 0; s < num_steps; ++s, a += PANEL_STEP, b += PANEL_STEP) {
            for (int64_t at = 0; prefetch && at < PANEL_STEP; at += CACHE_LINE)
                _mm_prefetch(prefetch + s * PANEL_STEP + at, _MM_HINT_T1);
            for (int64_t k = 0; k < TILE_PAIRS; ++k) {
                const __m512bh b_left = pairs(b + k * CACHE_LINE), b_right = pairs(b + TILE_BYTES + k * CACHE_LINE);
                for (int r = 0; r < ROWS; ++r) {
                    int32_t pair;
                    std::memcpy(&pair, a + r * CACHE_LINE + k * sizeof pair, sizeof pair);
                    const __m512bh everywhere = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
                    left[r] = _mm512_dpbf16_ps(left[r], everywhere, b_left);
                    right[r] = _mm512_dpbf16_ps(right[r], everywhere, b_right);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            _mm512_storeu_ps(c + r * ldc, left[r]);
            _mm512_storeu_ps(c + r * ldc + TILE_ROWS, right[r]);
        }
    }
}

#ifdef __AMX_BF16__

// Whether the system lets this process use the unit; asked once.
inline bool matrix_unit_runs() {
#ifdef HEED_EMULATES_AMX  // tests/lm/native/emulated_tiles.h
    return true;
#endif
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of the tiles' state
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}

// Call before a thread's first product: eight tiles of full size.
inline void configure() {
    if (!matrix_unit_runs()) return;
    struct alignas(CACHE_LINE) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" ::"r"(&config) : "memory");  // gcc 12 assumes that the next line reads only 8 bytes
    _tile_loadconfig(&config);
}

// Call after a thread's last product.
inline void release() {
    if (matrix_unit_runs()) _tile_release();
}

template <int beta>
inline void gemm_microkernel_by_tiles(const char* a_panel, const char* b_panel, int64_t num_steps, float* c,
                                      const char* prefetch, int64_t ldc) {
    const int64_t bytes = ldc * static_cast<int64_t>(sizeof(float));
    float *c_low = c, *c_high = c + TILE_ROWS * ldc;
    if constexpr (beta) {
        _tile_loadd(0, c_low, bytes);
        _tile_loadd(1, c_low + TILE_ROWS, bytes);
        _tile_loadd(2, c_high, bytes);
        _tile_loadd(3, c_high + TILE_ROWS, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < num_steps; ++s, a_panel += PANEL_STEP, b_panel += PANEL_STEP) {
        for (int64_t at = 0; prefetch && at < PANEL_STEP; at += CACHE_LINE)
            _mm_prefetch(prefetch + s * PANEL_STEP + at, _MM_HINT_T1);
        _tile_loadd(4, a_panel, CACHE_LINE);
        _tile_loadd(5, a_panel + TILE_BYTES, CACHE_LINE);
        _tile_loadd(6, b_panel, CACHE_LINE);
        _tile_loadd(7, b_panel + TILE_BYTES, CACHE_LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c_low, bytes);
    _tile_stored(1, c_low + TILE_ROWS, bytes);
    _tile_stored(2, c_high, bytes);
    _tile_stored(3, c_high + TILE_ROWS, bytes);
}

#else

inline bool matrix_unit_runs() { return false; }
inline void configure() {}
inline void release() {}

#endif

template <int beta = 0>
inline void gemm_microkernel(const char* a_panel, const char* b_panel, int64_t num_steps, float* c,
                             const char* prefetch, int64_t ldc = NR, int64_t num_rows = MR) {
#ifdef __AMX_BF16__
    if (matrix_unit_runs()) return gemm_microkernel_by_tiles<beta>(a_panel, b_panel, num_steps, c, prefetch, ldc);
#endif
    gemm_microkernel_by_vectors<beta>(a_panel, b_panel, num_steps, c, prefetch, ldc, num_rows);
}

// y = x Wᵀ + bias for this thread's panels of y's columns; x and W are packed, and put(row, column, numbers, count)
// receives 32 numbers of a row at a time, of which `count` exist.
template <class Put>
inline void gemm(const char* x, int64_t B, int64_t K, const char* weight, const float* bias, int64_t columns,
                    Share panels, Put put) {
    const int64_t steps = K / PANEL;
    alignas(CACHE_LINE) float sums[PANEL * PANEL];
    for (int64_t p = panels.begin; p < panels.end; ++p) {
        const char* panel = weight + p * steps * PANEL_STEP;
        const int64_t column = p * PANEL, real = std::min(PANEL, columns - column);
        alignas(CACHE_LINE) float offsets[PANEL] = {};
        if (bias) std::copy(bias + column, bias + column + real, offsets);
        const Wide offset = load(offsets);
        for (int64_t row = 0; row < B; row += PANEL) {
            const char* next = row ? nullptr : panel + steps * PANEL_STEP;
            gemm_microkernel(x + row / PANEL * steps * PANEL_STEP, panel, steps, sums, next, NR, std::min(MR, B - row));
            for (int64_t r = row; r < std::min(B, row + PANEL); ++r)
                put(r, column, load(sums + (r - row) * PANEL) + offset, real);
        }
    }
}

// A mask of the first `count` of 32 numbers.
inline __mmask32 first(int64_t count) { return count >= PANEL ? ~0u : count <= 0 ? 0u : (1u << count) - 1; }

// The first `real` numbers; zeros for the rest.
inline Wide load_some(const uint16_t* from, int64_t real) {
    alignas(CACHE_LINE) uint16_t numbers[PANEL];
    _mm512_store_si512(numbers, _mm512_maskz_loadu_epi16(first(real), from));
    return load(numbers);
}
inline void store_some(uint16_t* to, Wide x, int64_t real) {
    _mm512_mask_storeu_epi16(to, first(real), rounded(x));
}
