#include "decoder.h"

#include <algorithm>

#include "activations.h"

namespace outrider {

namespace {

// Up to here one thread does the rows' small work between two matrices sooner than the others could be told of it.
constexpr int kFewRows = 4;
constexpr int kRowsPerChunk = 4;

// Keeps a row's residual before `layer` for every tap there.
void keep_taps(const DecoderPass& pass, int hidden_size, int row, int layer) {
    const size_t num_taps = pass.taps.size();
    for (size_t tap = 0; tap < num_taps; ++tap) {
        if (pass.taps[tap] != layer) continue;
        std::copy_n(pass.residual + static_cast<size_t>(row) * hidden_size, hidden_size,
                    pass.tapped + (row * num_taps + tap) * hidden_size);
    }
}

}  // namespace

// The threads' way through the layers, and what they keep between its phases. A thread that comes late may still read
// the counts in here when the run is over, so the next run takes another one unless this is nobody else's.
class Decoder::Walk {
  public:
    Walk(const Decoder& decoder, const DecoderPass& pass, int first, int last)
        : machine_(*decoder.machine_), layers_(decoder.layers_), shape_(decoder.shape_) {
        prepare(pass, first, last);
    }

    void prepare(const DecoderPass& pass, int first, int last) {
        pass_ = pass;
        first_ = first;
        last_ = last;
        const int tile = kernels().row_tile, num_rows = pass.num_rows;
        normed_.prepare(num_rows, shape_.hidden_size, tile);
        attended_.prepare(num_rows, query_size(), tile);
        hidden_.prepare(num_rows, shape_.intermediate_size, tile);
        if (pass.embeddings != nullptr) wide_.prepare(num_rows, 2 * shape_.hidden_size, tile);
        const size_t qkv_size = static_cast<size_t>(num_rows) * qkv_stride();
        if (qkv_.size() < qkv_size) qkv_.resize(qkv_size);
        const PassPlan& plan = pass.full ? *pass.full : *pass.window;
        scratch_stride_ = (plan.scratch_floats() + 15) / 16 * 16;
        const size_t scratch_bytes = machine_.pool.num_threads() * scratch_stride_ * sizeof(float);
        if (scratch_.size() < scratch_bytes) scratch_ = HugeBuffer(scratch_bytes);
    }

    void run(Team& team) {
        each_row(team, [&](int row) { enter(row, first_); });
        for (int index = first_; index < last_; ++index) {
            const DecoderLayer& layer = (*layers_)[index];
            multiply(team, *layer.qkv, layer.is_wide() ? wide_ : normed_, false, qkv_.data(), qkv_stride(),
                     [&](int row) { place(row, index, layer); });
            attend(team, index, layer);
            multiply(team, *layer.attention_output, attended_, true, pass_.residual, shape_.hidden_size,
                     [&](int row) { normalize(row, layer.mlp_norm, *layer.gate_up); });
            gate(team, layer);
            multiply(team, *layer.down, hidden_, true, pass_.residual, shape_.hidden_size, [&](int row) {
                if (index + 1 < last_) {
                    enter(row, index + 1);
                } else if (last_ == num_layers()) {
                    keep_taps(pass_, shape_.hidden_size, row, last_);
                }
            });
        }
    }

  private:
    const Kernels& kernels() const { return machine_.kernels; }
    int num_layers() const { return static_cast<int>(layers_->size()); }
    int query_size() const { return shape_.num_heads * shape_.head_dim; }
    int kv_size() const { return shape_.num_kv_heads * shape_.head_dim; }
    int qkv_stride() const { return query_size() + 2 * kv_size(); }
    PassPlan& plan(const DecoderLayer& layer) { return layer.has_window ? *pass_.window : *pass_.full; }
    uint8_t* keys(int index) { return pass_.cache + 2 * index * pass_.cache_bytes; }
    uint8_t* values(int index) { return keys(index) + pass_.cache_bytes; }

    template <typename RowWork>
    void each_row(Team& team, RowWork&& work) {
        const int num_rows = pass_.num_rows;
        team.parallel_for((num_rows + kRowsPerChunk - 1) / kRowsPerChunk, [&](int chunk) {
            const int end = std::min(num_rows, (chunk + 1) * kRowsPerChunk);
            for (int row = chunk * kRowsPerChunk; row < end; ++row) work(row);
        });
    }

    // A phase, and then something for each row of what it computed.
    template <typename Body, typename RowWork>
    void phase(Team& team, int num_chunks, Body&& body, RowWork&& then) {
        if (pass_.num_rows > kFewRows) {
            team.parallel_for(num_chunks, body);
            return each_row(team, then);
        }
        team.parallel_for(num_chunks, body, [&] {
            for (int row = 0; row < pass_.num_rows; ++row) then(row);
        });
    }

    template <typename RowWork>
    void multiply(Team& team, const PackedLinear& linear, const Activations& from, bool accumulate, float* to,
                  int to_stride, RowWork&& then) {
        const Panels& panels = linear.panels();
        const LinearChunks chunks(panels.num_panels, panels.panel_bytes, pass_.num_rows, kernels().row_tile);
        const auto body = [&](int chunk) {
            chunks.run(chunk, [&](int begin, int end, int first_tile, int last_tile) {
                kernels().linear_panels(panels, from.input(), begin, end, first_tile, last_tile, accumulate, to,
                                        to_stride);
            });
        };
        phase(team, chunks.count(), body, then);
    }

    // hidden = silu(gate) * up, in the form the next layer reads.
    void gate(Team& team, const DecoderLayer& layer) {
        const Panels& panels = layer.gate_up->panels();
        const int intermediate = shape_.intermediate_size;
        const LinearChunks chunks((intermediate + kGroupSize - 1) / kGroupSize, 4 * panels.panel_bytes, pass_.num_rows,
                                  kernels().row_tile);
        const bool quantized = is_quantized(layer.down->panels().format);
        team.parallel_for(chunks.count(), [&](int chunk) {
            chunks.run(chunk, [&](int begin, int end, int first_tile, int last_tile) {
                kernels().swiglu_units(panels, normed_.input(), intermediate, begin, end, first_tile, last_tile,
                                       quantized ? &hidden_.input().quantized : nullptr, hidden_.floats(0),
                                       intermediate);
            });
        });
    }

    void attend(Team& team, int index, const DecoderLayer& layer) {
        PassPlan& work = plan(layer);
        const auto body = [&](int chunk) {
            const AttentionLayer attention = {qkv_.data(),   qkv_stride(),  shape_.attention_scale, keys(index),
                                              values(index), attended_.floats(0), query_size()};
            const AttentionPass pass = work.pass();
            float* scratch = reinterpret_cast<float*>(scratch_.bytes()) + team.thread() * scratch_stride_;
            for (int item = work.attention.chunks[chunk]; item < work.attention.chunks[chunk + 1]; ++item) {
                kernels().attend_item(pass, attention, work.attention.items[item], scratch);
            }
        };
        phase(team, work.num_chunks(), body, [&](int row) { hand_over(attended_, row, *layer.attention_output); });
    }

    // What a layer reads of a row.
    void enter(int row, int index) {
        const DecoderLayer& layer = (*layers_)[index];
        const int size = shape_.hidden_size;
        keep_taps(pass_, size, row, index);
        if (!layer.is_wide()) return normalize(row, layer.input_norm, *layer.qkv);
        const size_t at = static_cast<size_t>(row) * size;
        const float eps = shape_.rms_norm_eps;
        float* wide = wide_.floats(row);
        kernels().rms_norm_row(pass_.embeddings + at, layer.embedding_norm.data(), size, eps, wide);
        kernels().rms_norm_row(pass_.residual + at, layer.input_norm.data(), size, eps, wide + size);
        if (layer.norm_before_residual) std::copy_n(wide + size, size, pass_.residual + at);
        hand_over(wide_, row, *layer.qkv);
    }

    void normalize(int row, const std::vector<float>& weight, const PackedLinear& next) {
        const float* residual = pass_.residual + static_cast<size_t>(row) * shape_.hidden_size;
        kernels().rms_norm_row(residual, weight.data(), shape_.hidden_size, shape_.rms_norm_eps, normed_.floats(row));
        hand_over(normed_, row, next);
    }

    void hand_over(Activations& rows, int row, const PackedLinear& next) {
        if (!is_quantized(next.panels().format)) return;
        kernels().quantize_row(rows.floats(row), next.panels().in_features, row, rows.input().quantized);
    }

    // Norms and rotates a row's queries and keys, and stores its keys and values in their slot.
    void place(int row, int index, const DecoderLayer& layer) {
        const int head_dim = shape_.head_dim, num_rotated = shape_.num_heads + shape_.num_kv_heads;
        float* query = qkv_.data() + static_cast<size_t>(row) * qkv_stride();
        const size_t angles = static_cast<size_t>(row) * (head_dim / 2);
        for (int head = 0; head < num_rotated; ++head) {
            float* vector = query + head * head_dim;
            if (!layer.query_key_norm.empty()) {
                kernels().rms_norm_row(vector, layer.query_key_norm.data() + head * head_dim, head_dim,
                                       shape_.rms_norm_eps, vector);
            }
            kernels().rotate_head(vector, pass_.cos + angles, pass_.sin + angles, head_dim / 2);
        }
        const PassPlan& where = plan(layer);
        kernels().write_kv(where.layout, where.slots[row], query + query_size(), query + query_size() + kv_size(),
                           keys(index), values(index));
    }

    // Not owned: one of the machine's own threads may be the last to let go of this, and cannot wait for itself to end.
    Machine& machine_;
    const std::shared_ptr<const std::vector<DecoderLayer>> layers_;
    const DecoderShape shape_;
    DecoderPass pass_{};
    int first_ = 0, last_ = 0;
    Activations normed_, wide_, attended_, hidden_;
    std::vector<float> qkv_;  // [num_rows][queries, keys, values]
    HugeBuffer scratch_;      // of attention, [num_threads][scratch_stride]
    size_t scratch_stride_ = 0;
};

Decoder::Decoder(std::shared_ptr<Machine> machine, DecoderShape shape, std::vector<DecoderLayer> layers)
    : machine_(std::move(machine)),
      shape_(shape),
      layers_(std::make_shared<const std::vector<DecoderLayer>>(std::move(layers))) {}

void Decoder::run(const DecoderPass& pass, int first, int last) {
    if (first >= last && last == num_layers()) {
        for (int row = 0; row < pass.num_rows; ++row) keep_taps(pass, shape_.hidden_size, row, last);
    }
    if (first >= last || pass.num_rows == 0) return;
    if (walk_ && walk_.use_count() == 1) {
        walk_->prepare(pass, first, last);
    } else {
        walk_ = std::make_shared<Walk>(*this, pass, first, last);
    }
    machine_->pool.run([walk = walk_](Team& team) { walk->run(team); });
}

}  // namespace outrider
