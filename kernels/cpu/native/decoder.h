// All layers of a decoder-only transformer in one call: the threads stay together from the first norm to the last sum.
#pragma once

#include <memory>
#include <vector>

#include "machine.h"
#include "pass_plan.h"
#include "weights.h"

namespace outrider {

struct DecoderShape {
    int hidden_size;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int intermediate_size;
    float rms_norm_eps;
    float attention_scale;
};

struct DecoderLayer {
    std::vector<float> input_norm;      // [hidden_size]
    std::shared_ptr<const PackedLinear> qkv;
    std::vector<float> query_key_norm;  // [num_heads + num_kv_heads][head_dim], or empty
    std::shared_ptr<const PackedLinear> attention_output;
    std::vector<float> mlp_norm;        // [hidden_size]
    std::shared_ptr<const PackedLinear> gate_up;
    std::shared_ptr<const PackedLinear> down;
    bool has_window;
    std::vector<float> embedding_norm;  // [hidden_size] of a wide layer, whose qkv reads embeddings beside the residual
    bool norm_before_residual;          // of a wide layer: the residual goes on as input_norm leaves it

    bool is_wide() const { return !embedding_norm.empty(); }
};

// What one pass computes: rows, where they stand, and the pages they write and read.
struct DecoderPass {
    int num_rows;
    float* residual;   // [num_rows][hidden_size], changed in place
    const float* cos;  // [num_rows][head_dim / 2]
    const float* sin;
    uint8_t* cache;    // [num_layers][keys, values][num_pages * page bytes]
    size_t cache_bytes;  // of the keys, or the values, of one layer
    std::shared_ptr<PassPlan> full;    // for layers that see everything
    std::shared_ptr<PassPlan> window;  // for those with a sliding window
    const float* embeddings;  // [num_rows][hidden_size], for wide layers
    std::vector<int> taps;    // layers before which the residual is kept; num_layers: after the last
    float* tapped;            // [num_rows][taps][hidden_size]
};

class Decoder {
  public:
    Decoder(std::shared_ptr<Machine> machine, DecoderShape shape, std::vector<DecoderLayer> layers);

    // Layers first..last-1. One caller at a time.
    void run(const DecoderPass& pass, int first, int last);

    int num_layers() const { return static_cast<int>(layers_->size()); }
    const DecoderShape& shape() const { return shape_; }
    const DecoderLayer& layer(int index) const { return (*layers_)[index]; }

  private:
    class Walk;

    const std::shared_ptr<Machine> machine_;
    const DecoderShape shape_;
    const std::shared_ptr<const std::vector<DecoderLayer>> layers_;
    std::shared_ptr<Walk> walk_;
};

}  // namespace outrider
