#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>

#include "topo/topology.h"

namespace turbobus::topo {
namespace {

// Uses every field of the format.
constexpr std::string_view kFull = R"({
  "format": "jax_turbobus/topology",
  "version": 1,
  "name": "full \u00e9",
  "description": "everything at once",
  "numa_nodes": [{"id": "numa0", "memory_bytes_per_s": 1e11}, {"id": "numa1"}],
  "switches": [{"id": "sw", "type": "pcie"}, {"id": "nvs", "type": "nvswitch"}],
  "gpus": [
    {"id": "gpu0", "name": "G", "uuid": "GPU-0", "pci_address": "0000:01:00.0",
     "numa_node": "numa0"},
    {"id": "gpu1"}],
  "links": [
    {"id": "up", "type": "pcie", "a": "numa0", "b": "sw",
     "a_to_b_bytes_per_s": 1e10, "b_to_a_bytes_per_s": 1.1e10},
    {"id": "p0", "type": "pcie", "a": "sw", "b": "gpu0", "a_to_b_bytes_per_s": 5e9,
     "b_to_a_bytes_per_s": 5e9, "duplex_bytes_per_s": 9e9, "latency_ns": 700,
     "generation": 3, "max_generation": 4, "width": 8, "max_width": 16,
     "rate_source": "measured"},
    {"id": "p1", "type": "pcie", "a": "gpu1", "b": "numa1",
     "a_to_b_bytes_per_s": 5.5e9, "b_to_a_bytes_per_s": 5.25e9},
    {"id": "n0", "type": "nvlink", "a": "gpu0", "b": "nvs",
     "a_to_b_bytes_per_s": 2e10, "b_to_a_bytes_per_s": 2e10},
    {"id": "n1", "type": "nvlink", "a": "gpu1", "b": "nvs",
     "a_to_b_bytes_per_s": 2e10, "b_to_a_bytes_per_s": 2e10},
    {"id": "upi", "type": "upi", "a": "numa0", "b": "numa1",
     "a_to_b_bytes_per_s": 3e10, "b_to_a_bytes_per_s": 3e10,
     "rate_source": "estimated"}],
  "link_groups": [{"id": "g", "gpus": ["gpu0", "gpu1"], "h2d_bytes_per_s": 9e9,
                   "d2h_bytes_per_s": 9.5e9}],
  "peer_access": [["gpu0", "gpu1"]]
})";

std::string ErrorOf(std::string_view text) {
  const StatusOr<Topology> topology = Topology::FromJson(text, "f.json");
  if (topology.ok()) return "";
  EXPECT_EQ(topology.status().code(), StatusCode::kInvalidArgument);
  return topology.status().message();
}

std::string Replace(std::string_view from, std::string_view to) {
  std::string text(kFull);
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST(TopologyJsonTest, AFileWithEveryFieldReadsBackAsItself) {
  const StatusOr<Topology> topology = Topology::FromJson(kFull, "f.json");
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->gpus()[1].numa_node, 1) << "the nearest";
  EXPECT_TRUE(topology->links()[1].is_degraded());
  EXPECT_EQ(topology->links()[1].rate_source, RateSource::kMeasured);
  EXPECT_EQ(topology->links()[1].latency_ns, 700);
  const std::string text = topology->ToJson();
  const StatusOr<Topology> again = Topology::FromJson(text, "again");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ToJson(), text);
}

TEST(TopologyJsonTest, ErrorsNameFileLineFieldWhatWasExpectedAndWhatCame) {
  EXPECT_EQ(ErrorOf(Replace("5.5e9", "\"fast\"")),
            "topology f.json: line 20: links[2].a_to_b_bytes_per_s: expected "
            "bytes per "
            "second, above 0, got the string \"fast\"");
  EXPECT_HAS(
      ErrorOf(Replace("\"b\": \"numa1\"", "\"b\": \"numa9\"")),
      "links[2].b: expected the id of a GPU, NUMA node or switch of this file "
      "(gpu0, gpu1, numa0, numa1, nvs, sw), got the string \"numa9\"");
  EXPECT_HAS(
      ErrorOf(Replace("\"version\": 1", "\"version\": 2")),
      "version: expected 1, got 2; the file was written for another release");
  EXPECT_HAS(ErrorOf(Replace("\"id\": \"p1\", ", "")),
             "links[2].id: expected a name, got no such field; add it");
  EXPECT_HAS(ErrorOf(Replace("latency_ns", "latency_us")),
             "got the field \"latency_us\"; correct its name or remove it");
  EXPECT_HAS(
      ErrorOf(Replace("\"pcie\", \"a\": \"gpu1\"", "\"pci\", \"a\": \"gpu1\"")),
      "one of \"pcie\" \"nvlink\" \"upi\" \"c2c\", got the string \"pci\"");
  EXPECT_HAS(ErrorOf(Replace("700", "0.5")),
             "a whole number from 0 to 1000000000");
  EXPECT_HAS(
      ErrorOf(Replace("[\"gpu0\", \"gpu1\"]]", "[\"gpu0\"]]")),
      "peer_access[0]: expected an array of two GPU ids, got an array of 1");
  EXPECT_HAS(ErrorOf(kFull.substr(0, 700)), "is it cut short?");
  EXPECT_HAS(ErrorOf("[]"), "the file: expected an object, got an array of 0");
  EXPECT_HAS(ErrorOf("{\"format\": \"x\", \"version\": 1}"),
             "this is not a topology file");
  EXPECT_HAS(ErrorOf(Replace("1.1e10", "1e999")), "does not fit a double");
  EXPECT_HAS(ErrorOf(Replace("1.1e10", "1e99")), "got 1e+99");
}

/// Bytes flipped, cut, doubled and swapped: the answer is an error or a
/// topology that reads back, never a crash. TURBOBUS_SEED replays a run.
TEST(TopologyJsonTest, MutatedFilesNeverCrash) {
  const char* replay = std::getenv("TURBOBUS_SEED");
  const unsigned seed = replay != nullptr ? std::stoul(replay) : 20261130u;
  SCOPED_TRACE("TURBOBUS_SEED=" + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  constexpr std::string_view kSpice =
      "{}[]\",:0123456789eE+-.\\untf\n\xC3\xFF\x01";
  int num_good = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text(kFull);
    const size_t num_edits = 1 + below(3);
    for (size_t edit = 0; edit < num_edits && !text.empty(); ++edit) {
      const size_t at = below(text.size());
      switch (below(5)) {
        case 0:
          text[at] = kSpice[below(kSpice.size())];
          break;
        case 1:
          text.insert(at, 1, kSpice[below(kSpice.size())]);
          break;
        case 2:
          text.erase(at, 1 + below(8));
          break;
        case 3:
          text.insert(at, text.substr(below(text.size()), 1 + below(40)));
          break;
        default:
          text.resize(at);
      }
    }
    const StatusOr<Topology> topology = Topology::FromJson(text, "fuzz");
    if (!topology.ok()) {
      EXPECT_EQ(topology.status().code(), StatusCode::kInvalidArgument);
      continue;
    }
    ++num_good;
    const std::string written = topology->ToJson();
    const StatusOr<Topology> again = Topology::FromJson(written, "again");
    ASSERT_TRUE(again.ok()) << again.status() << "\n" << written;
    EXPECT_EQ(again->ToJson(), written);
    EXPECT_EQ(again->Lanes().paths.size(), topology->Lanes().paths.size());
  }
  EXPECT_GT(num_good, 20) << "the mutations are too harsh to test anything";
}

}  // namespace
}  // namespace turbobus::topo
