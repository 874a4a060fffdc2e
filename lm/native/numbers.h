// Loads and stores of fp32 and bf16; between them the kernels compute in fp32.

#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) {  // to the nearest, ties to even
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

// e^x with an error of at most 2 units in the last place, without branches, so that loops vectorise; 0 below the smallest
// normal number. x = n ln 2 + r with |r| <= ln(2) / 2, and e^r by its series. Of a number, or of a vector of them.
template <class X>
inline X exponential(X x) {
    using Whole = decltype(x < x);  // a vector of int32, or bool
    constexpr float LOWEST = -87.3f, HIGHEST = 88.3f, LOG2_E = 1.44269504f;
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;  // n times the first is exact
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const X zero = X{}, lowest = zero + LOWEST, highest = zero + HIGHEST;
    const X clamped = x < lowest ? lowest : x > highest ? highest : x;  // NaN stays
    const X n = (clamped * LOG2_E + TO_INTEGER) - TO_INTEGER;
    const X r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    X series = zero + 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    if constexpr (std::is_same_v<X, float>) {
        const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
        return x < lowest ? zero : series * power;
    } else {
        const X power = reinterpret_cast<X>((__builtin_convertvector(n, Whole) + 127) << 23);
        return x < lowest ? zero : series * power;
    }
}
