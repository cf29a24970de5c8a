#include "lazy/plan/print.h"

#include <utility>

#include "csrc/base/check.h"
#include "lazy/graph/print.h"

namespace acc::plan {
namespace {

// The nodes of a graph in groups. What one kernel computes stands under its name.
class Groups {
 public:
  explicit Groups(const graph::Graph& graph) : graph_(graph) {}

  void add(const std::vector<uint32_t>& nodes, const std::string& kernel) {
    const bool named = !kernel.empty();
    if (named) text_ += kernel + " {\n";
    for (const uint32_t node : nodes) {
      text_ += base::concat(named ? "  " : "", graph::print(graph_, graph_.nodes[node]), "\n");
    }
    if (named) text_ += "}\n";
  }
  std::string text() && { return std::move(text_); }

 private:
  const graph::Graph& graph_;
  std::string text_;
};

}  // namespace

std::string print(const graph::Graph& graph, const std::vector<bool>& stays) {
  std::string text;
  for (size_t i = 0; i < stays.size(); ++i) {
    if (stays[i]) text += graph::print(graph, graph.nodes[i]) + "\n";
  }
  return text;
}

std::string print(const graph::Graph& graph, const std::vector<passes::Cluster>& clusters) {
  Groups groups(graph);
  size_t loops = 0;
  for (const passes::Cluster& cluster : clusters) {
    const bool joined = cluster.nodes.size() > 1;
    groups.add(cluster.nodes, joined ? base::concat("loops ", loops++) : "");
  }
  return std::move(groups).text();
}

std::string print(const graph::Graph& graph, const std::vector<Step>& steps) {
  Groups groups(graph);
  for (const Step& step : steps) {
    std::string name;
    if (step.kernel != kNoKernel) {
      name = base::concat("kernel ", step.kernel);
      if (step.launches.size() > 1) name += base::concat(", ", step.launches.size(), " launches");
    }
    groups.add(step.nodes, name);
  }
  return std::move(groups).text();
}

}  // namespace acc::plan
