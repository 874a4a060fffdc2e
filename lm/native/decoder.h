// A decoder's shape and weights, and one decoding step, as Python passes them (lm/native/decoder.py).
//
// Shape letters: B sequences, D width, N heads, G key-value heads, H head dim, M MLP width, C columns of the cache,
// V vocabulary.

#pragma once

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
    int64_t D, N, G, H, M, V, num_layers, activation, norm_is_rms, is_bf16;
    double eps;
    const Layer* layers;
    const float *norm, *norm_bias;
    const char* head;
};

// x [B, D] is the input of the blocks, and is overwritten; cos and sin [B, H] rotate queries and keys, or are null.
// keys and values [layers, slots, G, C, H]: sequence b is in slot b; the step writes its column columns_B[b] and reads
// all columns up to that. Numbers are bf16 or fp32, as the decoder says.
struct Step {
    int64_t B, slots, C;
    const int64_t* columns_B;
    void *x, *keys, *values, *logits;
    const void *cos, *sin;
    char* scratch;
};
