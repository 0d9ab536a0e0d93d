#ifndef TURBOBUS_TOPO_UTF8_H_
#define TURBOBUS_TOPO_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace turbobus::topo {

/// Length of the UTF-8 sequence at the front of `text`, which is not empty; 0
/// if it is none.
size_t Utf8SequenceLength(std::string_view text);

/// Appends a code point, at most 0x10FFFF.
void AppendUtf8(uint32_t code, std::string& out);

}  // namespace turbobus::topo

#endif  // TURBOBUS_TOPO_UTF8_H_
