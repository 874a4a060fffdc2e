// Vectors and matrix products of a CPU with AVX-512 and AMX, in bf16 with fp32 sums.
//
// A tile is 16 rows of 16 pairs of bf16, 1 KiB. The unit multiplies a tile [16 rows, 16 pairs of k] by one
// [16 pairs of k, 16 columns] and adds to 16 x 16 fp32. A panel is 32 rows (or columns) of an operand: its tiles
// follow each other along k, two for every 32 k. Weights are put into panels once; what they multiply is written into
// panels by whoever computes it.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

constexpr int64_t SIDE = 16, PANEL = 32, TILE = 1024, PAIR = 2 * TILE;
constexpr int64_t LINE = 64;  // bytes that memory hands over at once: 32 bf16

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t panel_bytes(int64_t rows, int64_t K) { return ceil_div(rows, PANEL) * ceil_div(K, PANEL) * PAIR; }

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

// 32 numbers in fp32: the first 16, and the others.
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
    alignas(LINE) float numbers[32];
    _mm512_store_ps(numbers, x.low);
    _mm512_store_ps(numbers + 16, x.high);
#pragma omp simd
    for (int i = 0; i < 32; ++i) numbers[i] = f(numbers[i]);
    return load(numbers);
}

// Where panels of K columns keep 32 numbers of a row, from column k on.
inline char* place(char* panels, int64_t K, int64_t row, int64_t k) {
    return panels + (row / PANEL * (K / PANEL) + k / PANEL) * PAIR + row % PANEL / SIDE * TILE + row % SIDE * LINE;
}

// What one of several threads does of so many things.
struct Share {
    int64_t begin, end;
};
inline Share share(int64_t count, int64_t thread, int64_t threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

// Before a thread's first product: eight tiles of full size.
inline void configure() {
    struct alignas(LINE) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" ::"r"(&config) : "memory");  // gcc 12 believes that the next line reads 8 bytes
    _tile_loadconfig(&config);
}

// sums [32, 32] = a panel of rows times a panel of columns, or += with `adds`; rows of sums lie `stride` numbers apart.
// `next`, if any, goes into the second cache meanwhile.
template <bool adds = false>
inline void multiply(const char* rows, const char* columns, int64_t steps, float* sums, const char* next,
                     int64_t stride = PANEL) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
    if constexpr (adds) {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + SIDE, bytes);
        _tile_loadd(2, sums + SIDE * stride, bytes);
        _tile_loadd(3, sums + SIDE * stride + SIDE, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, rows += PAIR, columns += PAIR) {
        for (int64_t q = 0; next && q < PAIR; q += LINE) _mm_prefetch(next + s * PAIR + q, _MM_HINT_T1);
        _tile_loadd(4, rows, LINE);
        _tile_loadd(5, rows + TILE, LINE);
        _tile_loadd(6, columns, LINE);
        _tile_loadd(7, columns + TILE, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + SIDE, bytes);
    _tile_stored(2, sums + SIDE * stride, bytes);
    _tile_stored(3, sums + SIDE * stride + SIDE, bytes);
}

// y = x Wᵀ + bias for this thread's columns of y [B, columns]; put(row, column, 32 numbers of which so many are real).
template <class Put>
inline void product(const char* x, int64_t B, int64_t K, const char* weight, const float* bias, int64_t columns,
                    Share panels, Put put) {
    const int64_t steps = K / PANEL;
    alignas(LINE) float sums[PANEL * PANEL];
    for (int64_t p = panels.begin; p < panels.end; ++p) {
        const char* panel = weight + p * steps * PAIR;
        const int64_t column = p * PANEL, real = std::min(PANEL, columns - column);
        alignas(LINE) float offsets[PANEL] = {};
        if (bias) std::copy(bias + column, bias + column + real, offsets);
        const Wide offset = load(offsets);
        for (int64_t row = 0; row < B; row += PANEL) {
            multiply(x + row / PANEL * steps * PAIR, panel, steps, sums, row ? nullptr : panel + steps * PAIR);
            for (int64_t r = row; r < std::min(B, row + PANEL); ++r)
                put(r, column, load(sums + (r - row) * PANEL) + offset, real);
        }
    }
}

// The first so many of 32, a bit each.
inline __mmask32 first(int64_t count) { return count >= PANEL ? ~0u : count <= 0 ? 0u : (1u << count) - 1; }

// The first `real` of the numbers; zeros for the others.
inline Wide load_some(const uint16_t* from, int64_t real) {
    alignas(LINE) uint16_t numbers[PANEL];
    _mm512_store_si512(numbers, _mm512_maskz_loadu_epi16(first(real), from));
    return load(numbers);
}
inline void store_some(uint16_t* to, Wide x, int64_t real) {
    _mm512_mask_storeu_epi16(to, first(real), rounded(x));
}
