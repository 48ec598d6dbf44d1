// The Python module. Arrays come as numpy arrays over the caller's memory; shapes are checked here, once a pass.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "activations.h"
#include "checks.h"
#include "decoder.h"

namespace outrider {
namespace {

WeightFormat weight_format(const std::string& name) {
    static const char* const kNames[] = {"Q4_0", "Q4_1", "Q8_0", "Q8_CHANNEL", "BF16", "F32"};
    for (int i = 0; i < 6; ++i) {
        if (name == kNames[i]) return static_cast<WeightFormat>(i);
    }
    throw std::invalid_argument("no weight format called " + name);
}

size_t row_bytes(WeightFormat format, int in_features) {
    switch (format) {
        case WeightFormat::Q4_0: return in_features / kGroupSize * 18;
        case WeightFormat::Q4_1: return in_features / kGroupSize * 20;
        case WeightFormat::Q8_0: return in_features / kGroupSize * 34;
        case WeightFormat::Q8_CHANNEL: return in_features;
        case WeightFormat::BF16: return in_features * size_t{2};
        case WeightFormat::F32: return in_features * size_t{4};
    }
    return 0;
}

std::shared_ptr<PackedLinear> pack_linear(const std::string& format_name, int in_features,
                                          const std::vector<Array<uint8_t>>& blocks,
                                          const std::optional<Array<float>>& channel_scales,
                                          const std::optional<Array<float>>& bias) {
    const WeightFormat format = weight_format(format_name);
    require(in_features > 0, "in_features must be positive");
    require(format > WeightFormat::Q8_0 || in_features % kGroupSize == 0,
            format_name + " has groups of 32 inputs, and " + std::to_string(in_features) + " are not whole groups");
    std::vector<PackedLinear::StoredRows> stored;
    py::ssize_t num_rows = 0;
    const size_t bytes = row_bytes(format, in_features);
    for (const Array<uint8_t>& weight : blocks) {
        require_shape(weight, {weight.ndim() > 0 ? weight.shape(0) : 0, static_cast<py::ssize_t>(bytes)}, "blocks");
        stored.push_back({weight.data(), bytes, static_cast<int>(weight.shape(0))});
        num_rows += weight.shape(0);
    }
    require(channel_scales.has_value() == (format == WeightFormat::Q8_CHANNEL), "channel_scales are for Q8_CHANNEL");
    if (channel_scales) require_shape(*channel_scales, {num_rows}, "channel_scales");
    if (bias) require_shape(*bias, {num_rows}, "bias");
    const py::gil_scoped_release release;
    return std::make_shared<PackedLinear>(format, in_features, stored, channel_scales ? channel_scales->data() : nullptr,
                                          bias ? bias->data() : nullptr);
}

void unpack_rows(const PackedLinear& linear, const Array<int64_t>& channels, Array<float>& to) {
    const Panels& panels = linear.panels();
    const int in_features = panels.in_features, last = panels.num_panels - 1;
    require(last < 0 || panels.first_columns[last] == last * kPanelChannels,
            "rows of a layer that stacks several weights cannot be unpacked");
    require_shape(to, {channels.size(), in_features}, "to");
    const int64_t* ids = channels.data();
    for (py::ssize_t i = 0; i < channels.size(); ++i) {
        require(ids[i] >= 0 && ids[i] < panels.out_features,
                "row " + std::to_string(ids[i]) + " of a table with " + std::to_string(panels.out_features));
        linear.unpack_row(static_cast<int>(ids[i]), to.mutable_data() + i * in_features);
    }
}

// Runs row_work(row) for each row, several rows a chunk.
template <typename RowWork>
void each_row(Machine& machine, py::ssize_t num_rows, RowWork row_work) {
    constexpr int kRows = 4;
    const int rows = static_cast<int>(num_rows);
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for((rows + kRows - 1) / kRows, [&](int chunk) {
            for (int row = chunk * kRows; row < std::min(rows, (chunk + 1) * kRows); ++row) row_work(row);
        });
    });
}

void linear(Machine& machine, const Array<float>& x, const std::shared_ptr<PackedLinear>& packed, Array<float>& to) {
    const Panels& panels = packed->panels();
    require(x.ndim() == 2, "x must be [num_rows, in_features]");
    const int num_rows = static_cast<int>(x.shape(0)), tile = machine.kernels.row_tile;
    require_shape(x, {num_rows, panels.in_features}, "x");
    require_shape(to, {num_rows, panels.out_features}, "to");
    if (num_rows == 0) return;
    auto rows = std::make_shared<Activations>();
    rows->prepare(num_rows, panels.in_features, tile);
    const float* from = x.data();
    float* out = to.mutable_data();
    const bool quantized = is_quantized(panels.format);
    const LinearChunks chunks(panels.num_panels, panels.panel_bytes, num_rows, tile);
    const py::gil_scoped_release release;
    machine.pool.run([=, &machine, &panels](Team& team) {
        const Kernels& kernels = machine.kernels;
        LinearInput input = rows->input();
        if (quantized) {
            team.parallel_for(num_rows, [&](int row) {
                const float* values = from + static_cast<size_t>(row) * panels.in_features;
                kernels.quantize_row(values, panels.in_features, row, input.quantized);
            });
        } else {
            input.floats = from;
        }
        team.parallel_for(chunks.count(), [&](int chunk) {
            chunks.run(chunk, [&](int begin, int end, int first_tile, int last_tile) {
                kernels.linear_panels(panels, input, begin, end, first_tile, last_tile, false, out,
                                      panels.out_features);
            });
        });
    });
}

// weight: [n], or [num_heads * n] for rows of num_heads vectors.
void rms_norm(Machine& machine, const Array<float>& x, const Array<float>& weight, float eps, Array<float>& to) {
    require(x.ndim() == 2 && weight.ndim() == 2 && weight.shape(0) > 0, "x and weight must have two axes");
    require_shape(weight, {weight.shape(0), x.shape(1)}, "weight");
    require_shape(to, {x.shape(0), x.shape(1)}, "to");
    const float *from = x.data(), *weights = weight.data();
    float* out = to.mutable_data();
    const int n = static_cast<int>(x.shape(1)), num_weights = static_cast<int>(weight.shape(0));
    const Kernels* kernels = &machine.kernels;
    each_row(machine, x.shape(0), [=](int row) {
        const size_t at = static_cast<size_t>(row) * n;
        kernels->rms_norm_row(from + at, weights + static_cast<size_t>(row % num_weights) * n, n, eps, out + at);
    });
}

// x: [num_rows, num_heads, head_dim], changed in place; cos, sin: [num_rows, head_dim / 2].
void rotary(Machine& machine, Array<float>& x, const Array<float>& cos, const Array<float>& sin) {
    require(x.ndim() == 3 && x.shape(2) % 2 == 0, "x must be [num_rows, num_heads, head_dim], head_dim even");
    require_shape(cos, {x.shape(0), x.shape(2) / 2}, "cos");
    require_shape(sin, {x.shape(0), x.shape(2) / 2}, "sin");
    float* rows = x.mutable_data();
    const float *cosines = cos.data(), *sines = sin.data();
    const int num_heads = static_cast<int>(x.shape(1)), head_dim = static_cast<int>(x.shape(2)), half = head_dim / 2;
    const Kernels* kernels = &machine.kernels;
    each_row(machine, x.shape(0), [=](int row) {
        for (int head = 0; head < num_heads; ++head) {
            kernels->rotate_head(rows + (static_cast<size_t>(row) * num_heads + head) * head_dim,
                                 cosines + static_cast<size_t>(row) * half, sines + static_cast<size_t>(row) * half,
                                 half);
        }
    });
}

void silu_mul(Machine& machine, const Array<float>& gate_up, Array<float>& to) {
    require(gate_up.ndim() == 2 && gate_up.shape(1) % 2 == 0, "gate_up must be [num_rows, 2 * n]");
    require_shape(to, {gate_up.shape(0), gate_up.shape(1) / 2}, "to");
    const float* from = gate_up.data();
    float* out = to.mutable_data();
    const int n = static_cast<int>(gate_up.shape(1) / 2);
    const Kernels* kernels = &machine.kernels;
    each_row(machine, gate_up.shape(0), [=](int row) {
        const float* gate = from + static_cast<size_t>(row) * 2 * n;
        kernels->silu_mul_row(gate, gate + n, n, out + static_cast<size_t>(row) * n);
    });
}

void argmax(Machine& machine, const Array<float>& logits, Array<int64_t>& to) {
    require(logits.ndim() == 2 && logits.shape(1) > 0, "logits must be [num_rows, vocab_size]");
    require_shape(to, {logits.shape(0)}, "to");
    const float* rows = logits.data();
    int64_t* out = to.mutable_data();
    const int n = static_cast<int>(logits.shape(1)), num_rows = static_cast<int>(logits.shape(0));
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(num_rows,
                          [&](int row) { out[row] = kernels->argmax_row(rows + static_cast<size_t>(row) * n, n); });
    });
}

// `values`, `ids`: [num_rows, k].
void top_k(Machine& machine, const Array<float>& logits, Array<float>& values, Array<int32_t>& ids) {
    const int num_rows = static_cast<int>(axis_size(logits, 0)), n = static_cast<int>(axis_size(logits, 1));
    const int k = static_cast<int>(axis_size(values, 1));
    require_shape(logits, {num_rows, n}, "logits");
    require(0 < k && k <= n, "k must be from 1 to " + std::to_string(n) + ", not " + std::to_string(k));
    require_shape(values, {num_rows, k}, "values");
    require_shape(ids, {num_rows, k}, "ids");
    const float* rows = logits.data();
    float* top = values.mutable_data();
    int32_t* out = ids.mutable_data();
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(num_rows, [&](int row) {
            const size_t at = static_cast<size_t>(row) * k;
            kernels->top_k_row(rows + static_cast<size_t>(row) * n, n, k, top + at, out + at);
        });
    });
}

// `ids`: [vocab_size], of which the first are filled; returns how many.
int race_candidates(Machine& machine, const Array<float>& logits, float temperature, uint64_t draw,
                    Array<int32_t>& ids) {
    const py::ssize_t n = axis_size(logits, 0);
    require_shape(logits, {n}, "logits");
    require_shape(ids, {n}, "ids");
    require(n > 0, "logits must not be empty");
    require(temperature > 0, "temperature must be positive");
    return machine.kernels.race_candidates_row(logits.data(), static_cast<int>(n), temperature, draw,
                                               ids.mutable_data());
}

KvFormat kv_format(const std::string& name) {
    if (name == "f32") return KvFormat::F32;
    if (name == "f16") return KvFormat::F16;
    if (name == "int8") return KvFormat::INT8;
    throw std::invalid_argument("no KV cache format called " + name);
}

std::shared_ptr<PassPlan> plan_pass(const Machine& machine, const Array<int32_t>& cu_seqlens_q,
                                    const Array<int32_t>& seq_lens, const Array<int32_t>& page_tables,
                                    const Array<int64_t>& slot_mapping, int page_size, int num_heads, int num_kv_heads,
                                    int head_dim, int window, const std::string& format) {
    const py::ssize_t num_sequences = seq_lens.size();
    require(page_size > 0, "page_size must be positive, not " + std::to_string(page_size));
    require(window >= 0, "window must be 0 (none) or more, not " + std::to_string(window));
    require_heads(num_heads, num_kv_heads, head_dim);
    require_shape(page_tables, {num_sequences, axis_size(page_tables, 1)}, "page_tables");
    require_rows(cu_seqlens_q, seq_lens, page_tables.shape(1) * page_size);
    const int num_rows = cu_seqlens_q.at(num_sequences);
    require_shape(slot_mapping, {num_rows}, "slot_mapping");
    auto plan = std::make_shared<PassPlan>();
    plan->layout = {page_size, num_kv_heads, head_dim, kv_format(format)};
    plan->num_heads = num_heads;
    plan->window = window;
    plan->slots.assign(slot_mapping.data(), slot_mapping.data() + num_rows);
    plan->page_tables.assign(page_tables.data(), page_tables.data() + page_tables.size());
    plan->page_table_stride = page_tables.shape(1);
    plan->num_pages = required_pages(page_tables, slot_mapping, page_size);
    plan->attention = plan_attention(cu_seqlens_q.data(), seq_lens.data(), static_cast<int>(num_sequences),
                                     plan->layout, num_heads, window, machine.pool.num_threads());
    plan->partials.resize(plan->attention.num_partial_floats);
    return plan;
}

void write_kv(Machine& machine, const Array<float>& key, const Array<float>& value, Array<uint8_t>& keys,
              Array<uint8_t>& values, const std::shared_ptr<PassPlan>& plan) {
    const KvLayout& layout = plan->layout;
    const py::ssize_t num_rows = static_cast<py::ssize_t>(plan->slots.size());
    require_shape(key, {num_rows, layout.num_kv_heads, layout.head_dim}, "key");
    require_shape(value, {num_rows, layout.num_kv_heads, layout.head_dim}, "value");
    require_cache(keys, *plan, "keys");
    require_cache(values, *plan, "values");
    const float *key_rows = key.data(), *value_rows = value.data();
    uint8_t *key_cache = keys.mutable_data(), *value_cache = values.mutable_data();
    const size_t size = static_cast<size_t>(layout.num_kv_heads) * layout.head_dim;
    const Kernels* kernels = &machine.kernels;
    each_row(machine, num_rows, [=](int row) {
        kernels->write_kv(plan->layout, plan->slots[row], key_rows + row * size, value_rows + row * size, key_cache,
                          value_cache);
    });
}

void attention(Machine& machine, const Array<float>& query, const Array<uint8_t>& keys, const Array<uint8_t>& values,
               float scale, const std::shared_ptr<PassPlan>& plan, Array<float>& to) {
    const py::ssize_t num_rows = static_cast<py::ssize_t>(plan->slots.size());
    require_shape(query, {num_rows, plan->num_heads, plan->layout.head_dim}, "query");
    require_shape(to, {num_rows, plan->num_heads, plan->layout.head_dim}, "to");
    require_cache(keys, *plan, "keys");
    require_cache(values, *plan, "values");
    const int64_t stride = static_cast<int64_t>(plan->num_heads) * plan->layout.head_dim;
    const AttentionLayer layer = {query.data(), stride, scale, keys.data(), values.data(), to.mutable_data(), stride};
    const size_t scratch_stride = (plan->scratch_floats() + 15) / 16 * 16;
    const auto scratch = machine.scratch(scratch_stride * sizeof(float));
    const Kernels* kernels = &machine.kernels;
    const py::gil_scoped_release release;
    machine.pool.run([=](Team& team) {
        team.parallel_for(plan->num_chunks(), [&](int chunk) {
            float* own = reinterpret_cast<float*>(scratch->bytes()) + team.thread() * scratch_stride;
            for (int item = plan->attention.chunks[chunk]; item < plan->attention.chunks[chunk + 1]; ++item) {
                kernels->attend_item(plan->pass(), layer, plan->attention.items[item], own);
            }
        });
    });
}

std::vector<float> to_vector(const Array<float>& array) { return {array.data(), array.data() + array.size()}; }

std::shared_ptr<Decoder> make_decoder(const std::shared_ptr<Machine>& machine, int hidden_size, int num_heads,
                                      int num_kv_heads, int head_dim, float eps, float scale, const py::list& layers) {
    require(hidden_size > 0 && head_dim % 2 == 0, "hidden_size must be positive, head_dim even");
    require_heads(num_heads, num_kv_heads, head_dim);
    require(!layers.empty(), "a decoder needs at least one layer");
    DecoderShape shape = {hidden_size, num_heads, num_kv_heads, head_dim, 0, eps, scale};
    std::vector<DecoderLayer> native;
    for (const py::handle& layer : layers) {
        const auto linear_of = [&](const char* name) { return layer.attr(name).cast<std::shared_ptr<PackedLinear>>(); };
        DecoderLayer one;
        one.input_norm = to_vector(layer.attr("input_norm").cast<Array<float>>());
        one.qkv = linear_of("qkv");
        if (!layer.attr("query_key_norm").is_none()) {
            one.query_key_norm = to_vector(layer.attr("query_key_norm").cast<Array<float>>());
        }
        one.attention_output = linear_of("attention_output");
        one.mlp_norm = to_vector(layer.attr("mlp_norm").cast<Array<float>>());
        one.gate_up = linear_of("gate_up");
        one.down = linear_of("down");
        one.has_window = layer.attr("has_window").cast<bool>();
        if (native.empty() && one.down != nullptr) shape.intermediate_size = one.down->panels().in_features;
        require_layer(one, shape);
        native.push_back(std::move(one));
    }
    return std::make_shared<Decoder>(machine, shape, std::move(native));
}

void run_decoder(Decoder& decoder, Array<float>& residual, const Array<float>& cos, const Array<float>& sin,
                 Array<uint8_t>& cache, const std::shared_ptr<PassPlan>& full, const std::shared_ptr<PassPlan>& window,
                 int first, int last) {
    const DecoderShape& shape = decoder.shape();
    require(0 <= first && first <= last && last <= decoder.num_layers(),
            "there are layers 0 to " + std::to_string(decoder.num_layers()) + ", not " + std::to_string(first) + " to " +
                std::to_string(last));
    require_plans(decoder, full.get(), window.get(), first, last);
    const PassPlan& any = full ? *full : *window;
    const py::ssize_t num_rows = static_cast<py::ssize_t>(any.slots.size());
    require_shape(residual, {num_rows, shape.hidden_size}, "residual");
    require_shape(cos, {num_rows, shape.head_dim / 2}, "cos");
    require_shape(sin, {num_rows, shape.head_dim / 2}, "sin");
    for (const PassPlan* plan : {full.get(), window.get()}) {
        if (plan != nullptr) require_caches(cache, decoder.num_layers(), *plan);
    }
    const DecoderPass pass = {static_cast<int>(num_rows), residual.mutable_data(), cos.data(), sin.data(),
                              cache.mutable_data(), static_cast<size_t>(cache.size() / (cache.shape(0) * 2)), full,
                              window};
    const py::gil_scoped_release release;
    decoder.run(pass, first, last);
}

}  // namespace

void bind_ceilings(py::module_& module);

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native kernels of Outrider for CPUs; see outrider.kernels.cpu.operations.";
    module.def("instruction_sets", &instruction_sets, "Those this build has and this CPU can run, best first.");
    module.def("selected_instruction_set", &selected_instruction_set,
               "The best, or what the environment variable OUTRIDER_CPU_ISA names.");
    module.def(
        "advise_huge_pages", [](uintptr_t address, size_t num_bytes) {
            advise_huge_pages(reinterpret_cast<void*>(address), num_bytes);
        },
        py::arg("address"), py::arg("num_bytes"));

    py::class_<Machine, std::shared_ptr<Machine>>(module, "Machine")
        .def(py::init<int, const std::string&>(), py::arg("num_threads"), py::arg("instruction_set"))
        .def_property_readonly("num_threads", [](const Machine& machine) { return machine.pool.num_threads(); })
        .def_property_readonly("instruction_set",
                               [](const Machine& machine) { return machine.kernels.instruction_set; })
        .def("linear", &linear, py::arg("x").noconvert(), py::arg("packed").none(false), py::arg("to").noconvert())
        .def("rms_norm", &rms_norm, py::arg("x").noconvert(), py::arg("weight").noconvert(), py::arg("eps"),
             py::arg("to").noconvert())
        .def("rotary", &rotary, py::arg("x").noconvert(), py::arg("cos").noconvert(), py::arg("sin").noconvert())
        .def("silu_mul", &silu_mul, py::arg("gate_up").noconvert(), py::arg("to").noconvert())
        .def("argmax", &argmax, py::arg("logits").noconvert(), py::arg("to").noconvert())
        .def("top_k", &top_k, py::arg("logits").noconvert(), py::arg("values").noconvert(), py::arg("ids").noconvert())
        .def("race_candidates", &race_candidates, py::arg("logits").noconvert(), py::arg("temperature"),
             py::arg("draw"), py::arg("ids").noconvert())
        .def("plan_pass", &plan_pass, py::arg("cu_seqlens_q"), py::arg("seq_lens"), py::arg("page_tables"),
             py::arg("slot_mapping"), py::arg("page_size"), py::arg("num_heads"), py::arg("num_kv_heads"),
             py::arg("head_dim"), py::arg("window"), py::arg("kv_format"))
        .def("write_kv", &write_kv, py::arg("key").noconvert(), py::arg("value").noconvert(),
             py::arg("keys").noconvert(), py::arg("values").noconvert(), py::arg("plan").none(false))
        .def("attention", &attention, py::arg("query").noconvert(), py::arg("keys").noconvert(),
             py::arg("values").noconvert(), py::arg("scale"), py::arg("plan").none(false), py::arg("to").noconvert());

    py::class_<PackedLinear, std::shared_ptr<PackedLinear>>(module, "PackedLinear")
        .def_property_readonly("in_features", [](const PackedLinear& linear) { return linear.panels().in_features; })
        .def_property_readonly("out_features", [](const PackedLinear& linear) { return linear.panels().out_features; })
        .def_property_readonly("num_bytes", &PackedLinear::num_bytes)
        .def("unpack_rows", &unpack_rows, py::arg("channels").noconvert(), py::arg("to").noconvert());
    module.def("pack_linear", &pack_linear, py::arg("format"), py::arg("in_features"), py::arg("blocks"),
               py::arg("channel_scales") = py::none(), py::arg("bias") = py::none());

    py::class_<PassPlan, std::shared_ptr<PassPlan>>(module, "PassPlan");
    py::class_<Decoder, std::shared_ptr<Decoder>>(module, "Decoder")
        .def(py::init(&make_decoder), py::arg("machine").none(false), py::arg("hidden_size"), py::arg("num_heads"),
             py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("eps"), py::arg("scale"), py::arg("layers"))
        .def("run", &run_decoder, py::arg("residual").noconvert(), py::arg("cos").noconvert(),
             py::arg("sin").noconvert(), py::arg("cache").noconvert(), py::arg("full"), py::arg("window"),
             py::arg("first"), py::arg("last"));
    bind_ceilings(module);
}

}  // namespace outrider
