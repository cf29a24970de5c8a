#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

// Runs a program to its end, within a time limit.
namespace acc::jit {

struct Command {
  std::vector<std::string> arguments;    // the first is the path of the program
  std::vector<std::string> environment;  // NAME=value
  std::chrono::milliseconds limit{0};
};

struct Outcome {
  bool success = false;
  std::string problem;  // "ended with status 1"; empty when it succeeded
  std::string output;   // the first 4 KiB of what it wrote to standard output and error
};

// Starts the program without a shell, in a process group of its own with nothing to read, and waits
// for it. Whatever is left of the group at the end, or when the limit is over, is killed. A program
// whose end cannot be known, because the host process ignores or collects all of its children,
// counts as successful: look at what it made.
Outcome run(const Command& command);

// Kills every program that runs and lets none start any more. For the end of the process.
void stop_processes();
bool processes_stopped();

}  // namespace acc::jit
