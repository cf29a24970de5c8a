# tests/cpp: one GoogleTest program per file, over acc_pure alone, but for those of CUDA's files.
set(ACC_GTEST_SOURCE "" CACHE PATH "sources of GoogleTest, for systems without libgtest-dev")
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  find_path(acc_gtest_home src/gtest-all.cc NO_CACHE
    PATHS "${ACC_GTEST_SOURCE}" /usr/src/googletest/googletest /usr/src/gtest NO_DEFAULT_PATH)
  if(NOT acc_gtest_home)
    message(FATAL_ERROR "[cmake] GoogleTest was not found. `make test` brings it; by hand: "
      "apt-get install libgtest-dev")
  endif()
  add_library(acc_gtest STATIC
    "${acc_gtest_home}/src/gtest-all.cc" "${acc_gtest_home}/src/gtest_main.cc")
  target_include_directories(acc_gtest SYSTEM PUBLIC "${acc_gtest_home}/include")
  target_include_directories(acc_gtest SYSTEM PRIVATE "${acc_gtest_home}")
  target_link_libraries(acc_gtest PUBLIC acc_options Threads::Threads)
  add_library(GTest::gtest ALIAS acc_gtest)
  add_library(GTest::gtest_main ALIAS acc_gtest)
endif()

# Without ACC_TESTS_TWICE each program runs once, under the address sanitizer. But without one run
# those that only compute, in long loops, and those whose code or sizes are others there, too.
set(acc_only_plain hash|host_math)
set(acc_plain ${acc_only_plain}|compile|cuda_captures|cuda_emulator|cuda_kernels|cuda_products|cuda_rows|kernels|memory_plan|recompute)

# The thread sanitizer of g++ 13 and older gives up where the kernel spreads addresses widely
set(acc_launcher ${CMAKE_CROSSCOMPILING_EMULATOR})  # a program that runs those of another processor
if(ACC_SAN STREQUAL "thread")
  execute_process(COMMAND setarch -R true RESULT_VARIABLE acc_no_setarch ERROR_QUIET)
  if(acc_no_setarch EQUAL 0)
    set(acc_launcher setarch -R)
  endif()
endif()

file(GLOB acc_test_sources CONFIGURE_DEPENDS tests/cpp/*.cpp)
foreach(source ${acc_test_sources})
  get_filename_component(name "${source}" NAME_WE)
  # Under the thread sanitizer only those of code that several threads run.
  if(ACC_SAN STREQUAL "thread")
    file(STRINGS "${source}" acc_threads REGEX "std::thread|kernels/jit/" LIMIT_COUNT 1)
    if(NOT acc_threads OR name STREQUAL "test_host_math")  # its threads share nothing
      continue()
    endif()
  endif()
  if(NOT ACC_TESTS_TWICE)
    if((ACC_SAN STREQUAL "address" AND name MATCHES "^test_(${acc_only_plain})$")
        OR (NOT ACC_SAN AND NOT name MATCHES "^test_(${acc_plain})$"))
      continue()
    endif()
  endif()
  # What is built with CUDA only, tested beside a library that looks like NVIDIA's, and what uses
  # torch's allocators, with these.
  string(REGEX MATCH "^test_cuda_(captures|products)$" acc_of_cuda "${name}")
  if(acc_of_cuda AND NOT ACC_CUDA)
    continue()
  endif()
  add_executable(${name} "${source}")
  if(name STREQUAL "test_cuda_products")
    target_sources(${name} PRIVATE kernels/library/cuda_products.cpp)
    target_include_directories(${name} SYSTEM PRIVATE ${ACC_CUDA_INCLUDES})
  elseif(name STREQUAL "test_cuda_captures")
    target_sources(${name} PRIVATE csrc/runtime/cuda_draws.cpp csrc/runtime/cuda_pools.cpp)
    target_include_directories(${name} SYSTEM PRIVATE "${ACC_TORCH_DIR}/include")
    target_compile_options(${name} PRIVATE
      $<$<CXX_COMPILER_ID:GNU>:-Wno-interference-size>)
    # nothing here names the one that registers CUDA's allocator of pinned memory
    target_link_libraries(${name} PRIVATE -Wl,--no-as-needed "${acc_torch_lib}/libtorch_cuda.so"
      "${acc_torch_lib}/libtorch_cpu.so" "${acc_torch_lib}/libc10.so")
  endif()
  target_link_libraries(${name} PRIVATE acc_pure acc_options GTest::gtest GTest::gtest_main)
  # Optimising tests takes longer than running them, but where their own loops are long; under the
  # thread sanitizer it takes less. What is tested is compiled as ever.
  set(acc_unoptimised OFF)
  if(NOT ACC_SAN STREQUAL "thread" AND NOT name MATCHES "^test_(hash|host_math|memory_plan|recompute)$")
    set(acc_unoptimised ON)
  endif()
  set_target_properties(${name} PROPERTIES ACC_UNOPTIMISED ${acc_unoptimised})
  # GoogleTest's header is most of what they compile.
  if(ACC_PCH AND (acc_unoptimised OR ACC_SAN STREQUAL "thread"))
    if(acc_owns_pch)
      target_precompile_headers(${name} REUSE_FROM ${acc_owns_pch})
    else()
      target_precompile_headers(${name} PRIVATE <gtest/gtest.h>)
      set(acc_owns_pch ${name})
    endif()
  endif()
  # What takes longest begins first, as two tests.
  set(acc_shards 1)
  if(name STREQUAL "test_cuda_kernels" AND NOT ACC_SAN)
    set(acc_shards 2)
  endif()
  foreach(shard RANGE 1 ${acc_shards})
    set(acc_test ${name})
    set(acc_environment "ASAN_OPTIONS=detect_stack_use_after_return=1;TSAN_OPTIONS=halt_on_error=1")
    set(acc_cost)
    if(acc_shards GREATER 1)
      set(acc_test "${name}_${shard}")
      math(EXPR acc_index "${shard} - 1")
      list(APPEND acc_environment
        "GTEST_TOTAL_SHARDS=${acc_shards}" "GTEST_SHARD_INDEX=${acc_index}")
      set(acc_cost COST 1000)
    endif()
    add_test(NAME ${acc_test} COMMAND ${acc_launcher} $<TARGET_FILE:${name}> --gtest_brief=1
      WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}")
    set_tests_properties(${acc_test} PROPERTIES
      TIMEOUT 600 ENVIRONMENT "${acc_environment}" ${acc_cost})
  endforeach()
endforeach()
