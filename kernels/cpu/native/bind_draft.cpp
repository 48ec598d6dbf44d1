// Chains of drafts as Python makes and runs them.
#include <pybind11/stl.h>

#include <optional>

#include "checks.h"
#include "draft_chain.h"

namespace outrider {
namespace {

std::shared_ptr<DraftChain> make_draft(const std::shared_ptr<Machine>& machine, const std::shared_ptr<Decoder>& decoder,
                                       int window, const std::shared_ptr<PackedLinear>& embedding,
                                       const Array<float>& norm, const std::shared_ptr<PackedLinear>& head,
                                       const std::optional<Array<int64_t>>& token_map, bool conditioned) {
    const int hidden_size = decoder->shape().hidden_size, vocab_size = head->panels().out_features;
    require(window >= 0, "window must be 0 (none) or more, not " + std::to_string(window));
    require(vocab_size > 0 && embedding->panels().in_features == hidden_size &&
                head->panels().in_features == hidden_size,
            "table, head and decoder must have one hidden_size");
    require_shape(norm, {hidden_size}, "norm");
    for (int index = 0; index < decoder->num_layers(); ++index) {
        const DecoderLayer& layer = decoder->layer(index);
        require(!layer.is_wide() || conditioned, "a draft whose layers read embeddings must be conditioned");
        require(!layer.has_window || window > 0, "a layer has a window, and the draft does not say how wide");
    }
    DraftModel model = {machine, decoder, window, embedding, {norm.data(), norm.data() + norm.size()}, head, {},
                        conditioned};
    if (token_map) {
        require_shape(*token_map, {vocab_size}, "token_map");
        model.token_map.assign(token_map->data(), token_map->data() + vocab_size);
    }
    for (int i = 0; i < vocab_size; ++i) {
        const int64_t id = token_map ? model.token_map[i] : i;
        require(0 <= id && id < embedding->panels().out_features,
                "output " + std::to_string(i) + " stands for token " + std::to_string(id) + ", and the table has " +
                    std::to_string(embedding->panels().out_features));
    }
    return std::make_shared<DraftChain>(std::move(model));
}

// The chains' rows must lie in their page tables, and these in the cache.
void require_chains(const Array<int64_t>& positions, const Array<int32_t>& page_tables, const Array<int64_t>& limits,
                    py::ssize_t max_steps, int page_size, py::ssize_t num_pages) {
    const int64_t room = static_cast<int64_t>(page_tables.shape(1)) * page_size;
    for (py::ssize_t i = 0; i < positions.size(); ++i) {
        const int64_t limit = limits.data()[i], needed = positions.data()[i] + limit - 1;  // the last is not computed
        require(limit <= max_steps, "a chain may have " + std::to_string(limit) + " tokens, and there is room for " +
                                        std::to_string(max_steps));
        require(positions.data()[i] >= 0, "positions must not be negative");
        require(needed <= room, "a chain needs " + std::to_string(needed) + " positions, and its page table has " +
                                    std::to_string(room));
        require(limit <= 1 || page_tables.data()[i * page_tables.shape(1) + (needed - 1) / page_size] != 0,
                "a chain would write into the null page: reserve its pages first");
    }
    for (py::ssize_t i = 0; i < page_tables.size(); ++i) {
        require(0 <= page_tables.data()[i] && page_tables.data()[i] < num_pages, "a page table holds page " +
                std::to_string(page_tables.data()[i]) + ", and the cache has " + std::to_string(num_pages) + " pages");
    }
}

void run_chain(DraftChain& chain, const Array<float>& hidden, const Array<int64_t>& positions,
               const Array<int32_t>& page_tables, const Array<float>& cos, const Array<float>& sin,
               Array<uint8_t>& cache, const std::string& format, const Array<int64_t>& limits,
               const Array<double>& min_survival, const Array<double>& temperatures, const Array<uint64_t>& draws,
               Array<int64_t>& token_ids, Array<float>& confidences, Array<int64_t>& counts) {
    const DecoderShape& shape = chain.model().decoder->shape();
    const py::ssize_t num_sequences = axis_size(draws, 0), max_steps = axis_size(draws, 1);
    require_shape(draws, {num_sequences, max_steps}, "draws");
    require_shape(hidden, {num_sequences, shape.hidden_size}, "hidden");
    require_shape(positions, {num_sequences}, "positions");
    require_shape(page_tables, {num_sequences, axis_size(page_tables, 1)}, "page_tables");
    require_shape(cos, {num_sequences, max_steps, shape.head_dim / 2}, "cos");
    require_shape(sin, {num_sequences, max_steps, shape.head_dim / 2}, "sin");
    require_shape(limits, {num_sequences}, "limits");
    require_shape(min_survival, {num_sequences}, "min_survival");
    require_shape(temperatures, {num_sequences}, "temperatures");
    require_shape(token_ids, {num_sequences, max_steps}, "token_ids");
    require_shape(confidences, {num_sequences, max_steps}, "confidences");
    require_shape(counts, {num_sequences}, "counts");
    const int page_size = static_cast<int>(axis_size(cache, 3));
    require(page_size > 0, "cache must have six axes");
    const KvLayout layout = {page_size, shape.num_kv_heads, shape.head_dim, kv_format(format)};
    require_shape(cache, {chain.model().decoder->num_layers(), 2, cache.shape(2), page_size, shape.num_kv_heads,
                          kv_width(layout)}, "cache");
    require_chains(positions, page_tables, limits, max_steps, page_size, cache.shape(2));
    const DraftChains chains = {static_cast<int>(num_sequences),
                                static_cast<int>(max_steps),
                                hidden.data(),
                                positions.data(),
                                page_tables.data(),
                                static_cast<int64_t>(page_tables.shape(1)),
                                cos.data(),
                                sin.data(),
                                cache.mutable_data(),
                                static_cast<size_t>(cache.size() / (cache.shape(0) * 2)),
                                layout,
                                limits.data(),
                                min_survival.data(),
                                temperatures.data(),
                                draws.data(),
                                token_ids.mutable_data(),
                                confidences.mutable_data(),
                                counts.mutable_data()};
    const py::gil_scoped_release release;
    chain.run(chains);
}

}  // namespace

void bind_draft(py::module_& module) {
    py::class_<DraftChain, std::shared_ptr<DraftChain>>(module, "DraftChain")
        .def(py::init(&make_draft), py::arg("machine").none(false), py::arg("decoder").none(false), py::arg("window"),
             py::arg("embedding").none(false), py::arg("norm"), py::arg("head").none(false), py::arg("token_map"),
             py::arg("conditioned"))
        .def("run", &run_chain, py::arg("hidden").noconvert(), py::arg("positions"), py::arg("page_tables"),
             py::arg("cos").noconvert(), py::arg("sin").noconvert(),
             py::arg("cache").noconvert(), py::arg("kv_format"), py::arg("limits"),
             py::arg("min_survival"), py::arg("temperatures"), py::arg("draws"), py::arg("token_ids").noconvert(), py::arg("confidences").noconvert(), py::arg("counts").noconvert());
}

}  // namespace outrider
