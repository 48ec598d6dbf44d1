// A draft's chain of tokens in one call: head, choice, embedding and layers, step after step, without Python between.
//
// What it computes is kernels/draft_chain.py, composed of small operations; see Operations.draft_chain.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decoder.h"
#include "machine.h"
#include "weights.h"

namespace outrider {

struct DraftModel {
    std::shared_ptr<Machine> machine;
    std::shared_ptr<Decoder> decoder;
    int window;  // of the decoder's layers that have one
    std::shared_ptr<const PackedLinear> embedding;
    std::vector<float> norm;  // [hidden_size]
    std::shared_ptr<const PackedLinear> head;
    std::vector<int64_t> token_map;  // [head's out_features], or empty: each output stands for its own number
    bool conditioned;                // the residual of a row is what the row before left, and not its embedding
};

// One chain for each sequence.
struct DraftChains {
    int num_sequences;
    int max_steps;
    const float* hidden;         // [num_sequences][hidden_size], after the layers, not normalised
    const int64_t* positions;    // [num_sequences], of each chain's first row
    const int32_t* page_tables;  // [num_sequences][page_table_stride]
    int64_t page_table_stride;
    const float* cos;  // [num_sequences][max_steps][head_dim / 2]
    const float* sin;
    uint8_t* cache;
    size_t cache_bytes;  // of the keys, or the values, of one layer
    KvLayout layout;
    const int64_t* limits;        // [num_sequences]
    const double* min_survival;   // [num_sequences]
    const double* temperatures;   // [num_sequences]
    const uint64_t* draws;        // [num_sequences][max_steps]
    int64_t* token_ids;           // [num_sequences][max_steps], filled with -1
    float* confidences;           // [num_sequences][max_steps], filled with 0
    int64_t* counts;              // [num_sequences], filled with 0
};

class DraftChain {
  public:
    explicit DraftChain(DraftModel model) : model_(std::move(model)) {}

    const DraftModel& model() const { return model_; }

    // One caller at a time.
    void run(const DraftChains& chains);

  private:
    struct Head;

    void choose(const DraftChains& chains, int step);
    void advance(const DraftChains& chains, int step);
    std::shared_ptr<PassPlan> plan(const DraftChains& chains, int step, int window);

    const DraftModel model_;
    std::vector<int> alive_;       // sequences whose chains go on
    std::vector<double> survival_;  // [num_sequences]
    std::vector<float> hidden_;     // [alive][hidden_size]
    std::vector<float> embeddings_;  // [alive][hidden_size]
    std::vector<float> cos_, sin_;   // [alive][head_dim / 2]
    std::shared_ptr<Head> head_;
};

}  // namespace outrider
