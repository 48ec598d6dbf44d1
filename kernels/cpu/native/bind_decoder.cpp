// The decoder as Python makes and runs it.
#include <pybind11/stl.h>

#include <optional>

#include "checks.h"
#include "decoder.h"

namespace outrider {
namespace {

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
        if (!layer.attr("embedding_norm").is_none()) {
            one.embedding_norm = to_vector(layer.attr("embedding_norm").cast<Array<float>>());
        }
        one.norm_before_residual = layer.attr("norm_before_residual").cast<bool>();
        if (native.empty() && one.down != nullptr) shape.intermediate_size = one.down->panels().in_features;
        require_layer(one, shape);
        native.push_back(std::move(one));
    }
    return std::make_shared<Decoder>(machine, shape, std::move(native));
}

void run_decoder(Decoder& decoder, Array<float>& residual, const Array<float>& cos, const Array<float>& sin,
                 Array<uint8_t>& cache, const std::shared_ptr<PassPlan>& full, const std::shared_ptr<PassPlan>& window,
                 int first, int last, const std::optional<Array<float>>& embeddings, const std::vector<int>& taps,
                 std::optional<Array<float>>& tapped) {
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
    for (int index = first; index < last; ++index) {
        require(!decoder.layer(index).is_wide() || embeddings.has_value(),
                "layer " + std::to_string(index) + " reads embeddings, and the pass has none");
    }
    if (embeddings) require_shape(*embeddings, {num_rows, shape.hidden_size}, "embeddings");
    for (const int tap : taps) {
        require(0 <= tap && tap <= decoder.num_layers(), "taps are layers 0 to " + std::to_string(decoder.num_layers()) +
                                                             ", not " + std::to_string(tap));
    }
    require(taps.empty() || tapped.has_value(), "taps need room");
    if (!taps.empty()) {
        require_shape(*tapped, {num_rows, static_cast<py::ssize_t>(taps.size()) * shape.hidden_size}, "tapped");
    }
    const DecoderPass pass = {static_cast<int>(num_rows),
                              residual.mutable_data(),
                              cos.data(),
                              sin.data(),
                              cache.mutable_data(),
                              static_cast<size_t>(cache.size() / (cache.shape(0) * 2)),
                              full,
                              window,
                              embeddings ? embeddings->data() : nullptr,
                              taps,
                              taps.empty() ? nullptr : tapped->mutable_data()};
    const py::gil_scoped_release release;
    decoder.run(pass, first, last);
}

}  // namespace

void bind_decoder(py::module_& module) {
    py::class_<Decoder, std::shared_ptr<Decoder>>(module, "Decoder")
        .def(py::init(&make_decoder), py::arg("machine").none(false), py::arg("hidden_size"), py::arg("num_heads"),
             py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("eps"), py::arg("scale"), py::arg("layers"))
        .def("run", &run_decoder, py::arg("residual").noconvert(), py::arg("cos").noconvert(),
             py::arg("sin").noconvert(), py::arg("cache").noconvert(), py::arg("full"), py::arg("window"),
             py::arg("first"), py::arg("last"), py::arg("embeddings").noconvert() = py::none(),
             py::arg("taps") = std::vector<int>(), py::arg("tapped").noconvert() = py::none());
}

}  // namespace outrider
