#include "draft_chain.h"

#include <algorithm>
#include <cmath>

#include "activations.h"
#include "random_draw.h"

namespace outrider {

namespace {

// Which of `candidates` wins the race over a row of logits; see Kernels::race_candidates_row.
int32_t race_winner(const float* logits, const std::vector<int32_t>& candidates, int count, double temperature,
                    uint64_t draw, const int64_t* token_map) {
    double largest = -INFINITY, shortest = INFINITY;
    for (int i = 0; i < count; ++i) largest = std::max(largest, logits[candidates[i]] / temperature);
    int32_t winner = candidates[0];
    for (int i = 0; i < count; ++i) {
        const int32_t index = candidates[i];
        const uint64_t id = token_map != nullptr ? static_cast<uint64_t>(token_map[index]) : index;
        const double uniform = static_cast<double>(draw_bits(draw, id) + 1) * kDrawUnit;
        const double time = -std::log(uniform) / std::exp(logits[index] / temperature - largest);
        if (time < shortest) {
            shortest = time;
            winner = index;
        }
    }
    return winner;
}

}  // namespace

// What one step chooses from. A thread that comes late may still read the counts in here when the run is over, so the
// next run takes another one unless this is nobody else's.
struct DraftChain::Head {
    Activations rows;
    std::vector<float> logits;     // [num_rows][vocab_size]
    std::vector<int32_t> indices;  // [num_rows], -1: none
    std::vector<float> confidences;
    std::vector<std::vector<int32_t>> candidates;  // [num_rows][vocab_size]
    int num_rows = 0;

    void prepare(int rows_now, const Panels& panels, int row_tile) {
        num_rows = rows_now;
        const size_t n = static_cast<size_t>(num_rows);
        rows.prepare(num_rows, panels.in_features, row_tile);
        if (logits.size() < n * panels.out_features) logits.resize(n * panels.out_features);
        if (indices.size() < n) indices.resize(n);
        if (confidences.size() < n) confidences.resize(n);
        if (candidates.size() < n) candidates.resize(n);
    }
};

void DraftChain::run(const DraftChains& chains) {
    const int size = model_.decoder->shape().hidden_size;
    alive_.clear();
    for (int sequence = 0; sequence < chains.num_sequences; ++sequence) {
        if (chains.limits[sequence] > 0) alive_.push_back(sequence);
    }
    survival_.assign(chains.num_sequences, 1.0);
    hidden_.resize(alive_.size() * size);
    for (size_t row = 0; row < alive_.size(); ++row) {
        std::copy_n(chains.hidden + static_cast<size_t>(alive_[row]) * size, size, hidden_.data() + row * size);
    }
    for (int step = 0; step < chains.max_steps && !alive_.empty(); ++step) {
        choose(chains, step);
        if (!alive_.empty()) advance(chains, step);
    }
}

// The next token of each chain; those that end leave `alive_` and `hidden_`.
void DraftChain::choose(const DraftChains& chains, int step) {
    const Machine& machine = *model_.machine;
    const Panels& panels = model_.head->panels();
    const int num_rows = static_cast<int>(alive_.size()), size = panels.in_features, vocab = panels.out_features;
    const Kernels* kernels = &machine.kernels;
    if (!head_ || head_.use_count() > 1) head_ = std::make_shared<Head>();
    head_->prepare(num_rows, panels, kernels->row_tile);
    const auto to_row = [&](int row) {
        float* normed = head_->rows.floats(row);
        kernels->rms_norm_row(hidden_.data() + static_cast<size_t>(row) * size, model_.norm.data(), size,
                              model_.decoder->shape().rms_norm_eps, normed);
        if (is_quantized(panels.format)) kernels->quantize_row(normed, size, row, head_->rows.input().quantized);
    };
    for (int row = 0; row < num_rows; ++row) to_row(row);
    const LinearChunks chunks(panels.num_panels, panels.panel_bytes, num_rows, kernels->row_tile);
    const int64_t* token_map = model_.token_map.empty() ? nullptr : model_.token_map.data();
    model_.machine->pool.run([=, head = head_, linear = &panels, alive = alive_.data()](Team& team) {
        team.parallel_for(chunks.count(), [&](int chunk) {
            chunks.run(chunk, [&](int begin, int end, int first_tile, int last_tile) {
                kernels->linear_panels(*linear, head->rows.input(), begin, end, first_tile, last_tile, false,
                                       head->logits.data(), vocab);
            });
        });
        team.parallel_for(num_rows, [&](int row) {
            const float* logits = head->logits.data() + static_cast<size_t>(row) * vocab;
            const double temperature = chains.temperatures[alive[row]];
            const int32_t likeliest = kernels->argmax_row(logits, vocab);
            head->indices[row] = likeliest;
            if (likeliest < 0) return;
            if (temperature > 0) {
                std::vector<int32_t>& candidates = head->candidates[row];
                if (candidates.size() < static_cast<size_t>(vocab)) candidates.resize(vocab);
                const uint64_t draw = chains.draws[static_cast<size_t>(alive[row]) * chains.max_steps + step];
                const int count = kernels->race_candidates_row(logits, vocab, static_cast<float>(temperature), draw,
                                                               token_map, candidates.data());
                head->indices[row] = race_winner(logits, candidates, count, temperature, draw, token_map);
            }
            head->confidences[row] = kernels->probability_row(logits, vocab, head->indices[row], logits[likeliest],
                                                              static_cast<float>(temperature));
        });
    });

    int kept = 0;
    for (int row = 0; row < num_rows; ++row) {
        const int sequence = alive_[row];
        const int32_t index = head_->indices[row];
        if (index < 0) continue;
        survival_[sequence] *= head_->confidences[row];
        const double least = chains.min_survival[sequence];
        if (least > 0 && !(survival_[sequence] >= least)) continue;
        const size_t place = static_cast<size_t>(sequence) * chains.max_steps + step;
        chains.token_ids[place] = token_map != nullptr ? token_map[index] : index;
        chains.confidences[place] = head_->confidences[row];
        ++chains.counts[sequence];
        if (step + 1 >= chains.limits[sequence]) continue;
        if (kept != row) {
            std::copy_n(hidden_.data() + static_cast<size_t>(row) * size, size,
                        hidden_.data() + static_cast<size_t>(kept) * size);
        }
        alive_[kept++] = sequence;
    }
    alive_.resize(kept);
}

// One row more of each chain, that of the token just chosen, through the layers.
void DraftChain::advance(const DraftChains& chains, int step) {
    const DecoderShape& shape = model_.decoder->shape();
    const size_t size = shape.hidden_size, half = shape.head_dim / 2, num_rows = alive_.size();
    std::vector<float>& embeddings = model_.conditioned ? embeddings_ : hidden_;
    embeddings.resize(std::max(embeddings.size(), num_rows * size));
    cos_.resize(std::max(cos_.size(), num_rows * half));
    sin_.resize(std::max(sin_.size(), num_rows * half));
    bool has_full = false, has_window = false;
    for (int index = 0; index < model_.decoder->num_layers(); ++index) {
        (model_.decoder->layer(index).has_window ? has_window : has_full) = true;
    }
    for (size_t row = 0; row < num_rows; ++row) {
        const size_t place = static_cast<size_t>(alive_[row]) * chains.max_steps + step;
        model_.embedding->unpack_row(static_cast<int>(chains.token_ids[place]), embeddings.data() + row * size);
        std::copy_n(chains.cos + place * half, half, cos_.data() + row * half);
        std::copy_n(chains.sin + place * half, half, sin_.data() + row * half);
    }
    const DecoderPass pass = {static_cast<int>(num_rows),
                              hidden_.data(),
                              cos_.data(),
                              sin_.data(),
                              chains.cache,
                              chains.cache_bytes,
                              has_full ? plan(chains, step, 0) : nullptr,
                              has_window ? plan(chains, step, model_.window) : nullptr,
                              model_.conditioned ? embeddings_.data() : nullptr,
                              {},
                              nullptr};
    model_.decoder->run(pass, 0, model_.decoder->num_layers());
}

std::shared_ptr<PassPlan> DraftChain::plan(const DraftChains& chains, int step, int window) {
    const int num_rows = static_cast<int>(alive_.size()), page_size = chains.layout.page_size;
    const int64_t stride = chains.page_table_stride;
    std::vector<int32_t> cu_seqlens_q(num_rows + 1), seq_lens(num_rows), page_tables(num_rows * stride);
    std::vector<int64_t> slots(num_rows);
    for (int row = 0; row < num_rows; ++row) {
        const int64_t position = chains.positions[alive_[row]] + step;
        const int32_t* table = chains.page_tables + alive_[row] * stride;
        cu_seqlens_q[row + 1] = row + 1;
        seq_lens[row] = static_cast<int32_t>(position + 1);
        slots[row] = table[position / page_size] * static_cast<int64_t>(page_size) + position % page_size;
        std::copy_n(table, stride, page_tables.data() + row * stride);
    }
    const RaggedRows rows = {num_rows, cu_seqlens_q.data(), seq_lens.data(), page_tables.data(),
                             stride,   slots.data(),        nullptr};
    return make_pass_plan(rows, chains.layout, model_.decoder->shape().num_heads, window,
                          model_.machine->pool.num_threads());
}

}  // namespace outrider
