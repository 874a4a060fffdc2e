// Intel AMX in plain C++, for tests on CPUs that have AVX-512 BF16 but no matrix unit: compile with `-include` of this
// file, and the kernels' AMX paths run, slowly. Semantics as in Intel's SDM: TDPBF16PS adds products of pairs to fp32,
// the pair's first number first.

#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

#define __AMX_BF16__ 1
#define HEED_EMULATES_AMX 1

namespace emulated {

struct Tile {
    uint8_t row[16][64];
};
inline thread_local Tile tiles[8];

inline float number(const uint8_t* bits) {
    uint16_t half;
    std::memcpy(&half, bits, 2);
    return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

inline void load(int tile, const void* from, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(tiles[tile].row[r], static_cast<const char*>(from) + r * stride, 64);
}

inline void store(int tile, void* to, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles[tile].row[r], 64);
}

// sums [16, 16 fp32] += a [16, 16 pairs] times b [16 pairs, 16].
inline void multiply_add(int sums, int a, int b) {
    for (int m = 0; m < 16; ++m) {
        float row[16];
        std::memcpy(row, tiles[sums].row[m], 64);
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                row[n] += number(tiles[a].row[m] + 4 * k) * number(tiles[b].row[k] + 4 * n);
                row[n] += number(tiles[a].row[m] + 4 * k + 2) * number(tiles[b].row[k] + 4 * n + 2);
            }
        std::memcpy(tiles[sums].row[m], row, 64);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) std::memset(&emulated::tiles[tile], 0, sizeof(emulated::Tile))
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated::multiply_add(sums, a, b)
