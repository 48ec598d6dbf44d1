#include "huge_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace outrider {

namespace {

constexpr size_t kRegion = 16 * kHugePage;
constexpr size_t kAlignment = 64;

std::shared_ptr<uint8_t> make_region(size_t num_bytes) {
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, num_bytes));
    if (memory == nullptr) throw std::bad_alloc();
    advise_huge_pages(memory, num_bytes);
    return {memory, [](uint8_t* region) { std::free(region); }};
}

struct Cutter {
    std::mutex mutex;
    std::weak_ptr<uint8_t> region;
    size_t used = 0;
};

}  // namespace

HugeBuffer::HugeBuffer(size_t num_bytes) : num_bytes_(num_bytes) {
    static Cutter cutter;
    const std::lock_guard<std::mutex> lock(cutter.mutex);
    const size_t padded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::shared_ptr<uint8_t> region = cutter.region.lock();
    if (!region || cutter.used + padded > kRegion) {
        region = make_region((std::max(padded, kRegion) + kHugePage - 1) / kHugePage * kHugePage);
        cutter.region = region;
        cutter.used = 0;
    }
    memory_ = std::shared_ptr<uint8_t>(region, region.get() + cutter.used);
    cutter.used += padded;
    std::memset(memory_.get(), 0, padded);
}

}  // namespace outrider
