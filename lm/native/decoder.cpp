// One decoding step of a whole transformer by a CPU with a matrix unit (Intel AMX): every sequence reads one token. All
// threads take the same phases, each on a share of its own, and meet at a barrier between them, so nothing is started
// or handed over within a step; weights and the key-value cache pass through memory once. lm/native/decoder.py says when.
//
// Shape letters: B sequences, D width, N heads, G key-value heads, H head dim, E = (N + 2G) H, M MLP width,
// C columns of the cache, V vocabulary.

#include <cstddef>
#include <cstdint>

struct Layer {
    const float *attention_norm, *attention_norm_bias;
    const char* qkv;
    const float *qkv_bias, *query_norm, *key_norm;
    const char* out;
    const float *out_bias, *mlp_norm, *mlp_norm_bias;
    const char* up;
    const float* up_bias;
    const char* down;
    const float* down_bias;
    int64_t window;  // tokens back that it sees, its own included; 0 = all
};

enum Activation : int64_t { SWIGLU, RELU2, GELU_TANH, RELU };

struct Decoder {
    int64_t D, N, G, H, M, V, num_layers, activation, norm_is_rms;
    double eps;
    const Layer* layers;
    const float *norm, *norm_bias;
    const char* head;
};

// x [B, D] is what the blocks begin with, and is written over; cos and sin [B, H] turn queries and keys, or are null.
// keys and values [layers, B, G, C, H]: the step writes column `column` and reads from first_B[b] up to it.
struct Step {
    int64_t B, C, column;
    const int64_t* first_B;
    uint16_t *x, *keys, *values, *logits;
    const uint16_t *cos, *sin;
    char* scratch;
};

// Each struct's size and its fields' offsets; lm/native/decoder.py compares its own with them.
extern "C" {
extern const int64_t layer_layout[] = {
    sizeof(Layer),           offsetof(Layer, attention_norm), offsetof(Layer, attention_norm_bias),
    offsetof(Layer, qkv),    offsetof(Layer, qkv_bias),       offsetof(Layer, query_norm),
    offsetof(Layer, key_norm), offsetof(Layer, out),          offsetof(Layer, out_bias),
    offsetof(Layer, mlp_norm), offsetof(Layer, mlp_norm_bias), offsetof(Layer, up),
    offsetof(Layer, up_bias), offsetof(Layer, down),          offsetof(Layer, down_bias),
    offsetof(Layer, window),
};
extern const int64_t decoder_layout[] = {
    sizeof(Decoder),            offsetof(Decoder, D),           offsetof(Decoder, N),
    offsetof(Decoder, G),       offsetof(Decoder, H),           offsetof(Decoder, M),
    offsetof(Decoder, V),       offsetof(Decoder, num_layers),  offsetof(Decoder, activation),
    offsetof(Decoder, norm_is_rms), offsetof(Decoder, eps),     offsetof(Decoder, layers),
    offsetof(Decoder, norm),    offsetof(Decoder, norm_bias),   offsetof(Decoder, head),
};
extern const int64_t step_layout[] = {
    sizeof(Step),           offsetof(Step, B),      offsetof(Step, C),      offsetof(Step, column),
    offsetof(Step, first_B), offsetof(Step, x),     offsetof(Step, keys),   offsetof(Step, values),
    offsetof(Step, logits), offsetof(Step, cos),    offsetof(Step, sin),    offsetof(Step, scratch),
};
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "numbers.h"
#include "panels.h"
#include "tiles.h"

namespace {

// Threads that meet spin for longer than their shares differ, then let others have the core.
class Barrier {
  public:
    void wait(int64_t threads) {
        constexpr int SPINS = 2000;  // some 20 microseconds
        const int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; ++spins)
            spins < SPINS ? _mm_pause() : static_cast<void>(sched_yield());
    }

  private:
    alignas(LINE) std::atomic<int> arrived{0};
    alignas(LINE) std::atomic<int> round{0};
};

// A row's norm, into panels of D columns.
void norm(const Decoder& model, const uint16_t* x, const float* weight, const float* bias, int64_t row, char* panels) {
    const int64_t D = model.D;
    const float count = static_cast<float>(D);
    Wide total = all(0), squares = all(0);
    float mean = 0;
    if (!model.norm_is_rms) {
        for (int64_t k = 0; k < D; k += PANEL) total = total + load(x + k);
        mean = sum(total) / count;
    }
    for (int64_t k = 0; k < D; k += PANEL) {
        const Wide part = load(x + k) - all(mean);
        squares = squares + part * part;
    }
    const Wide scale = all(1 / std::sqrt(sum(squares) / count + static_cast<float>(model.eps)));
    for (int64_t k = 0; k < D; k += PANEL) {
        const Wide normed = (load(x + k) - all(mean)) * scale * load(weight + k);
        store(place(panels, D, row, k), normed + load_or_zero(bias ? bias + k : nullptr));
    }
}

// A query or key [H] as attention wants it: normed where there is a weight, turned where there are tables.
void turn(const Decoder& model, const uint16_t* from, const float* weight, const uint16_t* cos, const uint16_t* sin,
          uint16_t* to) {
    const int64_t H = model.H, half = H / 2;
    float scale = 1;
    if (weight) {
        Wide squares = all(0);
        for (int64_t i = 0; i < H; i += PANEL) squares = squares + load(from + i) * load(from + i);
        scale = 1 / std::sqrt(sum(squares) / static_cast<float>(H) + static_cast<float>(model.eps));
    }
    const auto normed = [&](int64_t i) {
        const __m512 x = load16(from + i);
        return weight ? round16(x * _mm512_set1_ps(scale) * _mm512_loadu_ps(weight + i)) : x;
    };
    for (int64_t i = 0; i < half; i += SIDE) {
        const __m512 low = normed(i), high = normed(i + half);
        store16(to + i, cos ? low * load16(cos + i) + high * load16(sin + i) : low);
        store16(to + i + half, cos ? high * load16(cos + i + half) + low * load16(sin + i + half) : high);
    }
}

// The sums of 16 vectors, as one.
inline __m512 sums_of(__m512 v[16]) {
    for (int i = 0; i < 16; i += 2) v[i] = _mm512_unpacklo_ps(v[i], v[i + 1]) + _mm512_unpackhi_ps(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(v[i]), b = _mm512_castps_pd(v[i + 2]);
        v[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    const auto fold = [](__m512 a, __m512 b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    return fold(fold(v[0], v[4]), fold(v[8], v[12]));
}

inline void fetch(const uint16_t* row, int64_t H) {
    for (int64_t i = 0; i < H; i += LINE / 2) _mm_prefetch(row + i, _MM_HINT_T0);
}

// softmax(q Kᵀ / √H) V of one query over `count` keys, into `to` [H]. Values are fetched while keys are read, and the
// keys of `next`, with which the thread goes on, while values are. `scores` has room for 16 more than `count`.
template <int LINES>
void attend(const uint16_t* q, const uint16_t* keys, const uint16_t* values, int64_t count, const uint16_t* next,
            float* scores, Wide to[LINES]) {
    constexpr int64_t H = LINES * 32;
    const auto numbers = [](const uint16_t* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); };
    __m512bh query[LINES];
    for (int i = 0; i < LINES; ++i) query[i] = numbers(q + 32 * i);
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt(static_cast<float>(H)));
    const __m512 lowest = _mm512_set1_ps(std::numeric_limits<float>::lowest());
    __m512 tops = lowest;
    for (int64_t s = 0; s < count; s += 16) {
        __m512 dots[16];
        for (int64_t j = 0; j < 16; ++j) {
            const int64_t key = std::min(s + j, count - 1);
            dots[j] = _mm512_setzero_ps();
            for (int i = 0; i < LINES; ++i)
                dots[j] = _mm512_dpbf16_ps(dots[j], numbers(keys + key * H + 32 * i), query[i]);
            fetch(values + key * H, H);
        }
        const __mmask16 real = count - s >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - s)) - 1);
        const __m512 some = _mm512_mask_mov_ps(lowest, real, sums_of(dots) * scale);
        _mm512_storeu_ps(scores + s, some);
        tops = _mm512_max_ps(tops, some);
    }
    const float top = _mm512_reduce_max_ps(tops);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t s = 0; s < count; ++s) total += scores[s] = exponential(scores[s] - top);
    for (int i = 0; i < LINES; ++i) to[i] = all(0);
    for (int64_t s = 0; s < count; ++s) {
        fetch(next + s * H, H);
        const Wide weight = all(scores[s]);
        for (int i = 0; i < LINES; ++i) to[i] = to[i] + weight * load(values + s * H + 32 * i);
    }
    for (int i = 0; i < LINES; ++i) to[i] = to[i] * all(1 / total);
}

// Attention of the sequences' key-value heads in `pairs` (b · G + g): new keys and values enter the cache, and every
// query head's result the panels of N · H columns.
template <int LINES>
void attend_pairs(const Decoder& model, const Step& step, const Layer& layer, int64_t number, const uint16_t* qkv,
                  Share pairs, std::vector<float>& scores, char* panels) {
    const int64_t N = model.N, G = model.G, H = model.H, C = step.C, group = N / G, E = (N + 2 * G) * H;
    const int64_t lowest = layer.window ? std::max<int64_t>(0, step.column + 1 - layer.window) : 0;
    alignas(LINE) uint16_t q[LINES * 32];
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        const int64_t b = pair / G, g = pair % G;
        const uint16_t* token = qkv + b * E;
        const uint16_t* cos = step.cos ? step.cos + b * H : nullptr;
        const uint16_t* sin = step.cos ? step.sin + b * H : nullptr;
        const int64_t start = ((number * step.B + b) * G + g) * C;
        const int64_t first = std::max(step.first_B[b], lowest), count = step.column + 1 - first;
        uint16_t* keys = step.keys + start * H;
        uint16_t* values = step.values + start * H;
        turn(model, token + (N + g) * H, layer.key_norm, cos, sin, keys + step.column * H);
        std::copy_n(token + (N + G + g) * H, H, values + step.column * H);
        for (int64_t n = g * group; n < (g + 1) * group; ++n) {
            turn(model, token + n * H, layer.query_norm, cos, sin, q);
            Wide result[LINES];
            const uint16_t* next = n + 1 < (g + 1) * group ? keys : keys + C * H;
            attend<LINES>(q, keys + first * H, values + first * H, count, next + first * H, scores.data(), result);
            for (int i = 0; i < LINES; ++i) store(place(panels, N * H, b, n * H + 32 * i), result[i]);
        }
    }
}

using AttendPairs = decltype(&attend_pairs<1>);

AttendPairs attend_pairs_of(int64_t head_dim) {
    switch (head_dim) {
        case 32: return attend_pairs<1>;
        case 64: return attend_pairs<2>;
        case 96: return attend_pairs<3>;
        case 128: return attend_pairs<4>;
        case 256: return attend_pairs<8>;
        default: return nullptr;
    }
}

// A row of the MLP's activations, into panels of M columns.
void activate(const Decoder& model, const uint16_t* up, int64_t row, char* panels) {
    const int64_t M = model.M;
    for (int64_t k = 0; k < M; k += PANEL) {
        Wide x = load(up + k);
        switch (model.activation) {
            case SWIGLU:
                x = each(x, [](float gate) { return gate / (1 + exponential(-gate)); }) * load(up + M + k);
                break;
            case GELU_TANH:
                // x (1 + tanh(u)) / 2 = x sigmoid(2u), u = √(2/π) (x + 0.044715 x³)
                x = each(x, [](float v) { return v / (1 + exponential(-1.5957691f * (v + 0.044715f * v * v * v))); });
                break;
            case RELU2:
                x = each(x, [](float v) { return v > 0 ? v * v : 0.0f; });
                break;
            default:
                x = each(x, [](float v) { return v > 0 ? v : 0.0f; });
        }
        store(place(panels, M, row, k), x);
    }
}

// The scratch of a step: what all threads read and write.
struct Scratch {
    char *normed, *attended, *activated;  // panels
    uint16_t *qkv, *up;                   // rows
    int64_t bytes;

    Scratch(const Decoder& model, int64_t B, char* memory) {
        int64_t used = 0;
        const auto take = [&](int64_t size) {
            char* at = memory + used;
            used += ceil_div(size, LINE) * LINE;
            return at;
        };
        normed = take(panel_bytes(B, model.D));
        attended = take(panel_bytes(B, model.N * model.H));
        activated = take(panel_bytes(B, model.M));
        qkv = reinterpret_cast<uint16_t*>(take(B * (model.N + 2 * model.G) * model.H * 2));
        up = reinterpret_cast<uint16_t*>(take(B * model.M * (model.activation == SWIGLU ? 2 : 1) * 2));
        bytes = used;
    }
};

void run(const Decoder& model, const Step& step, int64_t thread, int64_t threads, Barrier& barrier) {
    const int64_t B = step.B, D = model.D, heads = model.N * model.H, E = (model.N + 2 * model.G) * model.H;
    const int64_t up_columns = model.M * (model.activation == SWIGLU ? 2 : 1);
    const Scratch scratch(model, B, step.scratch);
    const AttendPairs attend_some = attend_pairs_of(model.H);
    const Share rows = share(B, thread, threads);
    const auto columns = [&](int64_t count) { return share(ceil_div(count, PANEL), thread, threads); };
    const auto into = [](uint16_t* to, int64_t width) {
        return [=](int64_t row, int64_t column, Wide x, int64_t real) {
            store_some(to + row * width + column, x, real);
        };
    };
    // A branch's result is rounded before it is added, as everywhere else.
    const auto add_to_stream = [&](int64_t row, int64_t column, Wide x, int64_t) {
        uint16_t* at = step.x + row * D + column;
        alignas(LINE) uint16_t branch[PANEL];
        store(branch, x);
        store(at, load(at) + load(branch));
    };
    std::vector<float> scores(step.C + SIDE);
    configure();
    for (int64_t number = 0; number < model.num_layers; ++number) {
        const Layer& layer = model.layers[number];
        for (int64_t b = rows.begin; b < rows.end; ++b)
            norm(model, step.x + b * D, layer.attention_norm, layer.attention_norm_bias, b, scratch.normed);
        barrier.wait(threads);
        product(scratch.normed, B, D, layer.qkv, layer.qkv_bias, E, columns(E), into(scratch.qkv, E));
        barrier.wait(threads);
        const Share pairs = share(B * model.G, thread, threads);
        attend_some(model, step, layer, number, scratch.qkv, pairs, scores, scratch.attended);
        barrier.wait(threads);
        product(scratch.attended, B, heads, layer.out, layer.out_bias, D, columns(D), add_to_stream);
        barrier.wait(threads);
        for (int64_t b = rows.begin; b < rows.end; ++b)
            norm(model, step.x + b * D, layer.mlp_norm, layer.mlp_norm_bias, b, scratch.normed);
        barrier.wait(threads);
        const Share up_share = columns(up_columns);
        product(scratch.normed, B, D, layer.up, layer.up_bias, up_columns, up_share, into(scratch.up, up_columns));
        barrier.wait(threads);
        for (int64_t b = rows.begin; b < rows.end; ++b)
            activate(model, scratch.up + b * up_columns, b, scratch.activated);
        barrier.wait(threads);
        product(scratch.activated, B, model.M, layer.down, layer.down_bias, D, columns(D), add_to_stream);
        barrier.wait(threads);
    }
    for (int64_t b = rows.begin; b < rows.end; ++b)
        norm(model, step.x + b * D, model.norm, model.norm_bias, b, scratch.normed);
    barrier.wait(threads);
    product(scratch.normed, B, D, model.head, nullptr, model.V, columns(model.V), into(step.logits, model.V));
    _tile_release();
}

}  // namespace

extern "C" {

// Whether this CPU has the unit and the system lets this process use it.
bool matrix_unit_runs() {
#ifdef HEED_EMULATES_AMX  // tests/lm/native/emulated_tiles.h
    return true;
#endif
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of the tiles' state
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// A weight [columns, K] in panels; K is a multiple of 32.
int64_t packed_bytes(int64_t columns, int64_t K) { return panel_bytes(columns, K); }

void pack_weight(const uint16_t* weight, int64_t columns, int64_t K, char* panels) {
    const int64_t bytes = panel_bytes(PANEL, K);
#pragma omp parallel
    {
        const Buffer rows = buffer(bytes);
#pragma omp for
        for (int64_t p = 0; p < ceil_div(columns, PANEL); ++p) {
            put_rows(weight + p * PANEL * K, K, std::min(PANEL, columns - p * PANEL), K, rows.get());
            turn_tiles(rows.get(), bytes / TILE, panels + p * bytes);
        }
    }
}

int64_t scratch_bytes(const Decoder* model, int64_t B) { return Scratch(*model, B, nullptr).bytes; }

void decode(const Decoder* model, const Step* step) {
    Barrier barrier;
#pragma omp parallel
    run(*model, *step, omp_get_thread_num(), omp_get_num_threads(), barrier);
}

}  // extern "C"

#else

extern "C" {
bool matrix_unit_runs() { return false; }
}

#endif
