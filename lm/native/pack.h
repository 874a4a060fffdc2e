// Packing: matrices in bf16 or fp32, rearranged into the order in which products read them; tiles.h multiplies them. The
// drawing is of bf16. A tile of fp32 has the same 16 rows (or columns) and 32 k, in 2 KiB, and its units are single numbers.
//
// A, row-major [M, K], becomes panels of MR = 32 rows. A panel is a sequence of steps of KC = 32 along k; a step is two
// tiles of 1 KiB, one for the panel's upper 16 rows and one for its lower 16. Rows and columns beyond the matrix are 0.
//
//          k: 0 ... 31   32 ... 63                     in memory, one panel after the other:
//          +-----------+-----------+
//   rows   |  tile 0   |  tile 2   |                   panel 0                          panel 1
//   0-15   |           |           |  panel 0          +--------+--------+--------+--------+--------+--
//          +-----------+-----------+  (MR rows)   ->   | tile 0 | tile 1 | tile 2 | tile 3 | tile 0 | ...
//   16-31  |  tile 1   |  tile 3   |                   +--------+--------+--------+--------+--------+--
//          +-----------+-----------+                    step 0 (k < 32)   step 1 (k < 64)
//   32-47  |  tile 0   |  tile 2   |  panel 1
//          +-----------+-----------+                   a tile of A: row r holds k = 0 ... 31 of row r
//
// B, row-major [K, N], becomes panels of NR = 32 columns in the same way: a step's two tiles are the panel's left and
// right 16 columns. Within a tile pairs of k lie together, since the unit multiplies two at a time ("VNNI" layout):
//
//   a tile of B:   row 0:   b[0][0] b[1][0]   b[0][1] b[1][1]   ...   b[0][15] b[1][15]
//                  row 1:   b[2][0] b[3][0]   b[2][1] b[3][1]   ...   b[2][15] b[3][15]
//                   ...
//                  row 15:  b[30][0] b[31][0]       ...               b[30][15] b[31][15]
//
// A weight W [N, K] is B = Wᵀ. Its packed form is that of A = W with each tile transposed in units of pairs
// (`a_to_b`), which is how a matrix is packed across its rows without reading it across them.

#pragma once

#include <memory>
#include <new>

#include "tiles.h"

struct Aligned {
    void operator()(char* data) const { ::operator delete[](data, std::align_val_t(CACHE_LINE)); }
};
using Buffer = std::unique_ptr<char[], Aligned>;
inline Buffer buffer(int64_t bytes) { return Buffer(static_cast<char*>(::operator new[](bytes, std::align_val_t(CACHE_LINE)))); }

// 32 numbers, of which the first `real` are copied and the others 0.
template <class Number>
inline void copy_line(const Number* from, int64_t real, Number* to) {
    real = std::clamp<int64_t>(real, 0, LINE);
    if (real == LINE) {
        std::memcpy(to, from, LINE * sizeof(Number));
        return;
    }
    std::fill_n(to, LINE, Number{});
    std::copy_n(from, real, to);
}

// Pack A [count, width], whose rows lie `lda` numbers apart.
template <class Number>
inline void pack_a(const Number* from, int64_t lda, int64_t count, int64_t width, char* panels) {
    const int64_t steps = ceil_div(width, PANEL);
    for (int64_t r = 0; r < ceil_div(count, PANEL) * PANEL; ++r)
        for (int64_t s = 0; s < steps; ++s)
            copy_line(from + r * lda + s * PANEL, r < count ? width - s * PANEL : 0,
                      packed_at<Number>(panels, steps * PANEL, r, s * PANEL));
}

// The units of LANES columns: a number of fp32 each, or two of bf16, the upper row's in the lower half.
inline Ints units_of(const float* from, int64_t) { return reinterpret_cast<Ints>(load_lanes(from)); }
inline Ints units_of(const bf16* from, int64_t ldb) {
    Halves upper, lower;
    std::memcpy(&upper, from, sizeof upper);
    std::memcpy(&lower, from + ldb, sizeof lower);
    return reinterpret_cast<Ints>(__builtin_convertvector(upper, Uints) | __builtin_convertvector(lower, Uints) << 16);
}

// Pack a step of a panel of B: 32 x 32 numbers, whose rows lie `ldb` numbers apart.
template <class Number>
inline void pack_b_step(const Number* from, int64_t ldb, char* to) {
    constexpr int64_t EACH = UNIT_BYTES / static_cast<int64_t>(sizeof(Number));  // rows of B in a unit
    for (int64_t r = 0; r < PANEL; r += EACH, to += UNIT_ROW_BYTES)
        for (int64_t j = 0; j < PANEL; j += LANES) {
            const Ints units = units_of(from + r * ldb + j, ldb);
            std::memcpy(to + j / TILE_ROWS * TILE_BYTES<Number> + j % TILE_ROWS * UNIT_BYTES, &units, sizeof units);
        }
}

// Pack B [count, width], whose rows lie `ldb` numbers apart; its panels lie `panel_bytes` apart.
template <class Number>
inline void pack_b(const Number* from, int64_t ldb, int64_t count, int64_t width, char* panels, int64_t panel_bytes) {
    for (int64_t r = 0; r < count; r += PANEL, panels += PANEL_STEP<Number>)
        for (int64_t c = 0; c < width; c += PANEL) {
            const Number* step = from + r * ldb + c;
            char* to = panels + c / PANEL * panel_bytes;
            if (count - r >= PANEL && width - c >= PANEL) {
                pack_b_step(step, ldb, to);
                continue;
            }
            alignas(CACHE_LINE) Number filled[PANEL * PANEL] = {};
            for (int64_t i = 0; i < std::min(PANEL, count - r); ++i)
                std::copy_n(step + i * ldb, std::min(PANEL, width - c), filled + i * PANEL);
            pack_b_step(filled, PANEL, to);
        }
}
template <class Number>
inline void pack_b(const Number* from, int64_t ldb, int64_t count, int64_t width, char* panels) {
    pack_b(from, ldb, count, width, panels, ceil_div(count, PANEL) * PANEL_STEP<Number>);
}

// Transpose tiles in units: packed A becomes its transpose packed as B, and the other way round.
template <class Number>
inline void a_to_b(const char* from, int64_t num_tiles, char* to) {
    for (int64_t tile = 0; tile < num_tiles; ++tile, from += TILE_BYTES<Number>, to += TILE_BYTES<Number>)
        for (int64_t u = 0; u < NUM_UNITS<Number>; u += 16)
            transpose_16x16(from + u * UNIT_BYTES, ROW_BYTES<Number>, to + u * UNIT_ROW_BYTES, UNIT_ROW_BYTES);
}
template <class Number>
inline void b_to_a(const char* from, int64_t num_tiles, char* to) {
    for (int64_t tile = 0; tile < num_tiles; ++tile, from += TILE_BYTES<Number>, to += TILE_BYTES<Number>)
        for (int64_t u = 0; u < NUM_UNITS<Number>; u += 16)
            transpose_16x16(from + u * UNIT_ROW_BYTES, UNIT_ROW_BYTES, to + u * UNIT_BYTES, ROW_BYTES<Number>);
}

// Whether products need the tiles of an A that was packed across its rows to be transposed.
template <class Number>
inline bool needs_transpose() { return std::is_same_v<Number, bf16> && matrix_unit_runs(); }
template <class Number>
inline int64_t transpose_bytes(int64_t bytes) { return needs_transpose<Number>() ? bytes : 0; }

// Panels of A for Order::COLUMNS, from Aᵀ packed as B. Vectors read those as they are. For the matrix unit they are transposed
// into `space`, which has `transpose_bytes` of their length.
template <class Number>
inline const char* left_operand(const char* across, int64_t num_tiles, char* space) {
    if (!needs_transpose<Number>()) return across;
    b_to_a<Number>(across, num_tiles, space);
    return space;
}
