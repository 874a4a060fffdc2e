// Matrix products of packed operands, bf16 or fp32, with fp32 sums: by the matrix unit (Intel AMX) for bf16 where the CPU
// has one, else by vectors.
//
// Operands lie in panels of 32 rows (of A) or columns (of B); pack.h draws them. A unit is 32 bits along k: one fp32 or a
// pair of bf16. The matrix unit multiplies tiles: one instruction adds the product of a tile of A [16 rows, 32 k] and a tile
// of B [32 k, 16 columns] to 16 x 16 fp32 of C. The microkernel holds four tiles of C, so that each tile it loads is used
// twice; its block of C is MR x NR and its step along k is KC, as in BLIS. Vectors read the same panels: one instruction adds
// the product of a row's unit in A and the units of some columns in B to as many numbers of C.

#pragma once

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

constexpr int64_t MR = 32, NR = 32, KC = 32;  // the microkernel's rows of C, columns of C, and k per step
constexpr int64_t PANEL = 32;                 // rows (or columns) of a packed panel
static_assert(PANEL == MR && PANEL == NR && PANEL == KC && PANEL == LINE, "one panel width serves A, B and k");
constexpr int64_t UNIT_BYTES = 4, TILE_ROWS = 16;
constexpr int64_t UNIT_ROW_BYTES = TILE_ROWS * UNIT_BYTES;  // of a tile of B: a unit of each of its columns

// What a step of KC takes in a panel of this type.
template <class Number>
constexpr int64_t ROW_BYTES = KC * static_cast<int64_t>(sizeof(Number));  // of A
template <class Number>
constexpr int64_t NUM_UNITS = ROW_BYTES<Number> / UNIT_BYTES;
template <class Number>
constexpr int64_t TILE_BYTES = TILE_ROWS * ROW_BYTES<Number>;
template <class Number>
constexpr int64_t PANEL_STEP = 2 * TILE_BYTES<Number>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <class Number>
inline int64_t packed_bytes_of(int64_t rows, int64_t K) {
    return ceil_div(rows, PANEL) * ceil_div(K, PANEL) * PANEL_STEP<Number>;
}

// Where packed panels of K columns keep a row's numbers from column k on, up to the next multiple of PANEL.
template <class Number>
inline Number* packed_at(char* panels, int64_t K, int64_t row, int64_t k) {
    char* step = panels + (row / PANEL * (K / PANEL) + k / PANEL) * PANEL_STEP<Number>;
    return reinterpret_cast<Number*>(step + row % PANEL * ROW_BYTES<Number>) + k % PANEL;
}

// A range of items, such as those of one thread.
struct Share {
    int64_t begin, end;
};
inline Share share(int64_t count, int64_t thread, int64_t threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

inline void prefetch_into_second_cache(const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(from + at, 0, 2);
}

// sums + a b of fp32, and of pairs of bf16, the pair's first number in the lower half of a unit.
inline Floats plus_product(Floats sums, Floats a, Floats b) { return sums + a * b; }
inline Floats plus_product(Floats sums, Ints a, Ints b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
    constexpr int32_t UPPER = -65536;
    sums += reinterpret_cast<Floats>(a << 16) * reinterpret_cast<Floats>(b << 16);
    return sums + reinterpret_cast<Floats>(a & UPPER) * reinterpret_cast<Floats>(b & UPPER);
#endif
}
template <class Number>
using Units = std::conditional_t<std::is_same_v<Number, float>, Floats, Ints>;

// How a panel of A is stored: as `pack_a` packs A, the units of a row side by side, or as `pack_b` packs Aᵀ, a unit of each
// of 16 rows side by side. Only vectors read the second.
enum class Order { ROWS, COLUMNS };
template <class Number, Order ORDER>
constexpr int64_t ROW_DISTANCE = ORDER == Order::ROWS ? ROW_BYTES<Number> : UNIT_BYTES;

// Where a panel of A keeps a row. B's panels keep their columns as Order::COLUMNS keeps rows.
template <class Number, Order ORDER>
inline const char* row_at(const char* panel, int64_t row) {
    return panel + row / TILE_ROWS * TILE_BYTES<Number> + row % TILE_ROWS * ROW_DISTANCE<Number, ORDER>;
}

// ROWS rows of C, and two vectors of columns. Not inlined: a caller's variables would push sums out of the registers.
template <class Number, Order ORDER, int ROWS>
[[gnu::noinline]] void add_block(const char* a, const char* b, const char* second, int64_t num_units, const char* prefetch, float* c,
                      int64_t ldc, bool beta) {
    using Vector = Units<Number>;
    using Unit = std::conditional_t<std::is_same_v<Number, float>, float, int32_t>;
    constexpr int64_t UNIT_DISTANCE = ORDER == Order::ROWS ? UNIT_BYTES : UNIT_ROW_BYTES;
    Floats left[ROWS], right[ROWS];
    unrolled<ROWS>([&](auto r) {
        left[r] = beta ? load_lanes(c + r * ldc) : Floats{};
        right[r] = beta ? load_lanes(c + r * ldc + LANES) : Floats{};
    });
    for (; num_units > 0; num_units -= NUM_UNITS<Number>) {
        if (prefetch) prefetch_into_second_cache(prefetch, PANEL_STEP<Number>), prefetch += PANEL_STEP<Number>;
        const int64_t own = std::min(num_units, NUM_UNITS<Number>);
        for (int64_t k = 0; k < own; ++k) {
            Vector b_left, b_right;
            std::memcpy(&b_left, b + k * UNIT_ROW_BYTES, sizeof b_left);
            std::memcpy(&b_right, second + k * UNIT_ROW_BYTES, sizeof b_right);
            keep(b_left);
            keep(b_right);
            unrolled<ROWS>([&](auto r) {
                Unit unit;
                std::memcpy(&unit, a + r * ROW_DISTANCE<Number, ORDER> + k * UNIT_DISTANCE, sizeof unit);
                const Vector a_everywhere = everywhere<Vector>(unit);
                left[r] = plus_product(left[r], a_everywhere, b_left);
                right[r] = plus_product(right[r], a_everywhere, b_right);
            });
        }
        a += PANEL_STEP<Number>, b += PANEL_STEP<Number>, second += PANEL_STEP<Number>;
    }
    unrolled<ROWS>([&](auto r) {
        store_lanes(c + r * ldc, left[r]);
        store_lanes(c + r * ldc + LANES, right[r]);
    });
}

// C [MR, NR] = A B + beta C with one packed panel of A and one of B over K numbers; beta is 0 or 1, and ldc the distance
// between rows of C in floats. Computes at least the first `num_rows` rows and `num_columns` columns of C, if it has that
// many.
// `prefetch`, if any, is fetched into the second-level cache meanwhile.
//
// By vectors: as many sums are held in registers as hide an instruction's latency.
template <class Number, Order ORDER>
inline void gemm_by_vectors(const char* a_panel, const char* b_panel, int64_t K, bool beta, float* c, const char* prefetch,
                            int64_t ldc, int64_t num_rows, int64_t num_columns) {
    constexpr int64_t ROWS = LANES == 16 ? 8 : 4;
    constexpr int64_t STEPS = LANES == 16 ? 1 << 20 : 8;  // of B at a time, so that small first caches hold its part
    const auto columns_at = [&](int64_t column) { return row_at<Number, Order::COLUMNS>(b_panel, column); };
    int64_t k = 0;
    do {  // also once for K = 0, which without beta sets C to 0
        const int64_t num_units = ceil_div(std::min(K - k, STEPS * KC) * static_cast<int64_t>(sizeof(Number)), UNIT_BYTES);
        const int64_t at = k / KC * PANEL_STEP<Number>;
        for (int64_t column = 0; column < std::min(NR, num_columns); column += 2 * LANES)
            for (int64_t row = 0; row < std::min(MR, num_rows); row += ROWS)
                add_block<Number, ORDER, ROWS>(row_at<Number, ORDER>(a_panel, row) + at, columns_at(column) + at,
                                               columns_at(column + LANES) + at, num_units,
                                               prefetch && row + column == 0 ? prefetch + at : nullptr, c + row * ldc + column,
                                               ldc, beta || k > 0);
        k += STEPS * KC;
    } while (k < K);
}

#ifdef __AMX_BF16__

// Whether the system lets this process use the unit; checked once.
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

inline void gemm_by_tiles(const char* a_panel, const char* b_panel, int64_t K, bool beta, float* c, const char* prefetch,
                          int64_t ldc) {
    constexpr int64_t TILE = TILE_BYTES<bf16>, STEP = PANEL_STEP<bf16>;
    const int64_t bytes = ldc * static_cast<int64_t>(sizeof(float));
    float *c_low = c, *c_high = c + TILE_ROWS * ldc;
    if (beta) {
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
    for (int64_t k = 0; k < K; k += KC, a_panel += STEP, b_panel += STEP) {
        if (prefetch) prefetch_into_second_cache(prefetch + k / KC * STEP, STEP);
        _tile_loadd(4, a_panel, CACHE_LINE);
        _tile_loadd(5, a_panel + TILE, CACHE_LINE);
        _tile_loadd(6, b_panel, CACHE_LINE);
        _tile_loadd(7, b_panel + TILE, CACHE_LINE);
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

// With Order::COLUMNS, pass what `left_operand` (pack.h) returned; for the matrix unit that is by rows.
template <class Number, Order ORDER = Order::ROWS>
inline void gemm_microkernel(const char* a_panel, const char* b_panel, int64_t K, bool beta, float* c,
                             const char* prefetch = nullptr, int64_t ldc = NR, int64_t num_rows = MR,
                             int64_t num_columns = NR) {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<Number, bf16>)
        if (matrix_unit_runs()) return gemm_by_tiles(a_panel, b_panel, K, beta, c, prefetch, ldc);
#endif
    gemm_by_vectors<Number, ORDER>(a_panel, b_panel, K, beta, c, prefetch, ldc, num_rows, num_columns);
}

// y = x Wᵀ + bias for this thread's panels of y's columns; x and W are packed, and put(row, column, numbers, count)
// receives 32 numbers of a row at a time, of which `count` exist.
template <class Number, class Put>
inline void gemm(const char* x, int64_t B, int64_t K, const char* weight, const float* bias, int64_t columns,
                 Share panels, Put put) {
    const int64_t panel_bytes = K / PANEL * PANEL_STEP<Number>;
    alignas(CACHE_LINE) float sums[PANEL * PANEL];
    for (int64_t p = panels.begin; p < panels.end; ++p) {
        const char* panel = weight + p * panel_bytes;
        const int64_t column = p * PANEL, real = std::min(PANEL, columns - column);
        const Wide offset = bias ? load_some(bias + column, real) : all(0);
        for (int64_t row = 0; row < B; row += PANEL) {
            const char* next = row ? nullptr : panel + panel_bytes;
            gemm_microkernel<Number>(x + row / PANEL * panel_bytes, panel, K, false, sums, next, NR, std::min(MR, B - row), real);
            for (int64_t r = row; r < std::min(B, row + PANEL); ++r)
                put(r, column, load(sums + (r - row) * PANEL) + offset, real);
        }
    }
}
