// Memory that is read from end to end at every step: aligned, and in huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace outrider {

constexpr size_t kHugePage = size_t{2} << 20;

// Asks for huge pages; harmless where there are none. Most systems give them only to those who ask.
inline void advise_huge_pages(void* memory, size_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const auto begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
    const auto end = (reinterpret_cast<uintptr_t>(memory) + num_bytes) / kHugePage * kHugePage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)num_bytes;
#endif
}

// A piece of zeroed memory. Pieces are cut from regions of many huge pages, since one matrix of a small model does not
// fill a huge page; a region is given back with its last piece.
class HugeBuffer {
  public:
    HugeBuffer() = default;
    explicit HugeBuffer(size_t num_bytes);

    uint8_t* bytes() const { return memory_.get(); }
    size_t size() const { return num_bytes_; }

  private:
    std::shared_ptr<uint8_t> memory_;
    size_t num_bytes_ = 0;
};

}  // namespace outrider
