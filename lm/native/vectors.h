// Vectors as wide as the CPU's registers, by the compiler's vector extension: one source for AVX-512, AVX2, SSE and NEON.
// Numbers are fp32 between load and store; in memory they are fp32 or bf16.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "numbers.h"

#if defined(__AVX512F__)
constexpr int64_t VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int64_t VECTOR_BYTES = 32;
#else
constexpr int64_t VECTOR_BYTES = 16;
#endif
constexpr int64_t LANES = VECTOR_BYTES / 4;  // fp32 numbers of a vector
constexpr int64_t LINE = 32;                 // numbers that loads and stores move at a time
constexpr int64_t PARTS = LINE / LANES;      // vectors of a line
constexpr int64_t CACHE_LINE = 64;           // bytes

using Floats = float __attribute__((vector_size(VECTOR_BYTES)));
using Ints = int32_t __attribute__((vector_size(VECTOR_BYTES)));
using Uints = uint32_t __attribute__((vector_size(VECTOR_BYTES)));
using Halves = uint16_t __attribute__((vector_size(VECTOR_BYTES / 2)));  // the bits of LANES bf16 numbers

// Calls f with 0, 1, ..., COUNT - 1 as constants.
template <int64_t COUNT, class F>
[[gnu::always_inline]] inline void unrolled(F f) {
    [&]<int64_t... I>(std::integer_sequence<int64_t, I...>) {
        (f(std::integral_constant<int64_t, I>()), ...);
    }(std::make_integer_sequence<int64_t, COUNT>());
}

// A vector with one number in all lanes. (V{} + x would be an addition: it turns -0 into 0.)
template <class V, class X>
[[gnu::always_inline]] inline V everywhere(X x) {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return V{(static_cast<void>(I), x)...};
    }(std::make_integer_sequence<int, LANES>());
}
// Holds a vector in a register; a compiler may otherwise read it from memory at each use.
template <class V>
[[gnu::always_inline]] inline void keep(V& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#else
    static_cast<void>(x);
#endif
}

inline Floats all_lanes(float x) { return everywhere<Floats>(x); }
inline Floats load_lanes(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline void store_lanes(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// 0, 1, 2, ...
inline Ints lane_numbers() {
    return []<int... I>(std::integer_sequence<int, I...>) {
        return Ints{I...};
    }(std::make_integer_sequence<int, LANES>());
}

// The bits of LANES bf16 numbers as fp32, and fp32 rounded to the nearest bf16, ties to even.
inline Floats widened(Halves bits) { return reinterpret_cast<Floats>(__builtin_convertvector(bits, Uints) << 16); }
inline Halves narrowed(Floats x) {
#ifdef __AVX512BF16__
    return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(x));
#else
    const Uints bits = reinterpret_cast<Uints>(x);
    const Uints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : Uints{} + 0x7fc0, Halves);
#endif
}

inline Floats load_lanes(const bf16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return widened(bits);
}
inline void store_lanes(bf16* to, Floats x) {
    const Halves bits = narrowed(x);
    std::memcpy(to, &bits, sizeof bits);
}

// A line: 32 numbers.
struct Wide {
    Floats part[PARTS];
};

template <class F>
[[gnu::always_inline]] inline Wide by_part(F f) {
    Wide y;
    unrolled<PARTS>([&](auto i) { y.part[i] = f(i); });
    return y;
}

inline Wide operator+(Wide a, Wide b) { return by_part([&](auto i) { return a.part[i] + b.part[i]; }); }
inline Wide operator-(Wide a, Wide b) { return by_part([&](auto i) { return a.part[i] - b.part[i]; }); }
inline Wide operator*(Wide a, Wide b) { return by_part([&](auto i) { return a.part[i] * b.part[i]; }); }
inline Wide all(float x) { return by_part([&](auto) { return all_lanes(x); }); }

template <class Number>
inline Wide load(const Number* from) {
    return by_part([&](auto i) { return load_lanes(from + i * LANES); });
}
template <class Number>
inline void store(Number* to, Wide x) {
    unrolled<PARTS>([&](auto i) { store_lanes(to + i * LANES, x.part[i]); });
}
inline Wide load_or_zero(const float* from) { return from ? load(from) : all(0); }

// The first `real` numbers of a line; zeros for the rest, which is not read.
template <class Number>
inline Wide load_some(const Number* from, int64_t real) {
    if (real >= LINE) return load(from);
    alignas(CACHE_LINE) Number numbers[LINE] = {};
    std::copy_n(from, std::max<int64_t>(0, real), numbers);
    return load(numbers);
}
#if defined(__AVX512BW__)
inline __mmask32 first(int64_t count) { return count >= LINE ? ~0u : count <= 0 ? 0u : (1u << count) - 1; }
template <>
inline Wide load_some(const bf16* from, int64_t real) {
    const __m512i bits = _mm512_maskz_loadu_epi16(first(real), from);
    return {widened(reinterpret_cast<Halves>(_mm512_castsi512_si256(bits))),
            widened(reinterpret_cast<Halves>(_mm512_extracti64x4_epi64(bits, 1)))};
}
template <>
inline Wide load_some(const float* from, int64_t real) {
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(first(real)), from),
            _mm512_maskz_loadu_ps(static_cast<__mmask16>(first(real - 16)), from + 16)};
}
#elif defined(__AVX2__)
template <>
inline Wide load_some(const float* from, int64_t real) {
    return by_part([&](auto i) {
        const Ints is_real = lane_numbers() < static_cast<int32_t>(real - i * LANES);
        return Floats(_mm256_maskload_ps(from + i * LANES, reinterpret_cast<__m256i>(is_real)));
    });
}
#endif

// Stores the first `real` numbers of a line.
template <class Number>
inline void store_some(Number* to, Wide x, int64_t real) {
    if (real >= LINE) return store(to, x);
    alignas(CACHE_LINE) Number numbers[LINE];
    store(numbers, x);
    std::copy_n(numbers, std::max<int64_t>(0, real), to);
}

// Lanes of two vectors: I < LANES takes from a, the others from b.
template <int... I, class V>
inline V shuffled(V a, V b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, Ints{I...});
#endif
}

// `shuffled` by a function of the lane's number.
template <class Lane, class V>
[[gnu::always_inline]] inline V shuffled_by(V a, V b) {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return shuffled<Lane::from(I)...>(a, b);
    }(std::make_integer_sequence<int, LANES>());
}

struct Even {
    static constexpr int from(int lane) { return 2 * lane; }
};
struct Odd {
    static constexpr int from(int lane) { return 2 * lane + 1; }
};

// The sum of each of LANES vectors, as one vector: neighbours are added until one number of each is left.
inline Floats sums_of(const Floats (&v)[LANES]) {
    Floats rest[LANES];
    unrolled<LANES>([&](auto i) { rest[i] = v[i]; });
    for (int64_t count = LANES; count > 1; count /= 2)
        for (int64_t i = 0; i < count / 2; ++i)
            rest[i] = shuffled_by<Even>(rest[2 * i], rest[2 * i + 1]) + shuffled_by<Odd>(rest[2 * i], rest[2 * i + 1]);
    return rest[0];
}

inline float reduced(Floats x, auto f) {
    float numbers[LANES];
    store_lanes(numbers, x);
    for (int64_t count = LANES / 2; count > 0; count /= 2)
        for (int64_t i = 0; i < count; ++i) numbers[i] = f(numbers[i], numbers[i + count]);
    return numbers[0];
}
inline float sum(Floats x) {
    return reduced(x, [](float a, float b) { return a + b; });
}
inline float largest(Floats x) {
    return reduced(x, [](float a, float b) { return std::max(a, b); });
}
inline float sum(Wide x) {
    Floats total = x.part[0];
    unrolled<PARTS - 1>([&](auto i) { total += x.part[i + 1]; });
    return sum(total);
}
inline float largest(Wide x) {
    Floats top = x.part[0];
    unrolled<PARTS - 1>([&](auto i) { top = top > x.part[i + 1] ? top : x.part[i + 1]; });
    return largest(top);
}

inline Wide exponential(Wide x) {
    return by_part([&](auto i) { return exponential(x.part[i]); });
}

// x where the line's bit is 1, else `other`.
inline Wide chosen(uint32_t bits, Wide x, float other) {
    if (bits == ~0u) return x;
    const Ints set = everywhere<Ints>(static_cast<int32_t>(bits));
    return by_part([&](auto i) {
        const Ints own = (set >> (lane_numbers() + static_cast<int32_t>(i * LANES))) & 1;
        return own != 0 ? x.part[i] : all_lanes(other);
    });
}
inline Wide largest(Wide a, Wide b) {
    return by_part([&](auto i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}

// Transposes 16 x 16 numbers of 32 bits, whose rows lie so many bytes apart.
struct TransposingStage {
    // Lanes whose number has the bit `half` swap with the partner's lanes that do not have it.
    template <int half>
    struct Upper {
        static constexpr int from(int lane) { return lane & half ? lane - half + static_cast<int>(LANES) : lane; }
    };
    template <int half>
    struct Lower {
        static constexpr int from(int lane) { return lane & half ? lane + static_cast<int>(LANES) : lane + half; }
    };
    template <int half>
    static void run(Ints (&rows)[LANES]) {
        unrolled<LANES>([&](auto i) {
            if constexpr ((i & half) == 0) {
                const Ints a = rows[i], b = rows[i + half];
                rows[i] = shuffled_by<Upper<half>>(a, b);
                rows[i + half] = shuffled_by<Lower<half>>(a, b);
            }
        });
        if constexpr (half > 1) run<half / 2>(rows);
    }
};
inline void transpose_16x16(const char* from, int64_t from_bytes, char* to, int64_t to_bytes) {
    for (int64_t i = 0; i < 16; i += LANES)
        for (int64_t j = 0; j < 16; j += LANES) {
            Ints rows[LANES];
            unrolled<LANES>([&](auto r) { std::memcpy(&rows[r], from + (i + r) * from_bytes + j * 4, sizeof(Ints)); });
            TransposingStage::run<LANES / 2>(rows);
            unrolled<LANES>([&](auto r) { std::memcpy(to + (j + r) * to_bytes + i * 4, &rows[r], sizeof(Ints)); });
        }
}
