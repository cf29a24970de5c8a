# The extension module torchacc_device/_C: the edge to torch, and acc_pure.
foreach(required ACC_TORCH_DIR ACC_PYTHON_INCLUDE)
  if(NOT ${required})
    message(FATAL_ERROR "[cmake] ${required} is empty. Build through `make develop` or "
      "`python scripts/native.py develop`, which finds torch and Python.")
  endif()
endforeach()

file(GLOB_RECURSE acc_edge_sources CONFIGURE_DEPENDS
  csrc/runtime/*.cpp csrc/aten/*.cpp lazy/record/*.cpp lazy/exec/*.cpp lazy/session/*.cpp lazy/capture/*.cpp
  kernels/*.cpp distributed/*.cpp torchacc_device/csrc/*.cpp)
list(REMOVE_ITEM acc_edge_sources ${acc_pure_sources})
list(FILTER acc_edge_sources EXCLUDE REGEX "_main\\.cpp$")
set(acc_cuda_file "/(cuda_[^/]*|[^/]*_cuda)\\.cpp$")
set(acc_stand_in_file "/no_[^/]*\\.cpp$")
if(ACC_CUDA)
  list(FILTER acc_edge_sources EXCLUDE REGEX "${acc_stand_in_file}")
else()
  # no_cuda.cpp matches both patterns and stays
  set(acc_stand_ins ${acc_edge_sources})
  list(FILTER acc_stand_ins INCLUDE REGEX "${acc_stand_in_file}")
  list(FILTER acc_edge_sources EXCLUDE REGEX "${acc_cuda_file}")
  list(APPEND acc_edge_sources ${acc_stand_ins})
  list(REMOVE_DUPLICATES acc_edge_sources)
endif()

add_library(_C MODULE ${acc_edge_sources})
target_link_libraries(_C PRIVATE acc_pure acc_options)
set_target_properties(_C PROPERTIES
  PREFIX "" SUFFIX "${ACC_EXT_SUFFIX}"
  LIBRARY_OUTPUT_DIRECTORY "${ACC_OUTPUT_DIR}"
  SKIP_BUILD_RPATH ON)
target_include_directories(_C SYSTEM PRIVATE
  "${ACC_TORCH_DIR}/include"
  "${ACC_TORCH_DIR}/include/torch/csrc/api/include"
  "${ACC_PYTHON_INCLUDE}")
# torch's wheels have the header of ProcessGroupGloo, but none of Gloo's that it includes:
# distributed/tags.cpp declares what it names of these
set(acc_gloo_headers "${CMAKE_BINARY_DIR}/gloo_headers")
foreach(header algorithm common/error context rendezvous/store transport/device)
  file(CONFIGURE OUTPUT "${acc_gloo_headers}/gloo/${header}.h" CONTENT "")
endforeach()
set_source_files_properties(distributed/tags.cpp PROPERTIES INCLUDE_DIRECTORIES
  "${acc_gloo_headers}")
# c10/cuda/CUDAEvent.h and its like use the interference size, which g++ comments on at each use
target_compile_options(_C PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-interference-size>
  "-fmacro-prefix-map=${ACC_TORCH_DIR}/=torch/")
# at::parallel_for is a template over OpenMP: without the flag our own loops would be serial. The
# library itself is torch's, loaded before us.
target_compile_options(_C PRIVATE -fopenmp)
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)

set(acc_torch_lib "${ACC_TORCH_DIR}/lib")
target_link_libraries(_C PRIVATE
  "${acc_torch_lib}/libtorch.so" "${acc_torch_lib}/libtorch_cpu.so"
  "${acc_torch_lib}/libtorch_python.so" "${acc_torch_lib}/libc10.so")
if(ACC_CUDA)
  if(NOT ACC_CUDART)
    message(FATAL_ERROR "[cmake] ACC_CUDA is on and ACC_CUDART is empty. Build through scripts/native.py.")
  endif()
  target_include_directories(_C SYSTEM PRIVATE ${ACC_CUDA_INCLUDES})
  target_link_libraries(_C PRIVATE
    "${acc_torch_lib}/libtorch_cuda.so" "${acc_torch_lib}/libc10_cuda.so" "${ACC_CUDART}"
    ${ACC_CUDA_LIBRARIES})
endif()
# torch is imported first and has then loaded every library named here; the run path is for tools
# that look at the module alone, and relative, so that a wheel names no directory of its builder
if(ACC_RPATH)
  target_link_options(_C PRIVATE "-Wl,--enable-new-dtags,-rpath,${ACC_RPATH}")
endif()

# The emulator of GPUs, for tests of the executor.
if(ACC_EMULATOR)
  add_library(acc_emulator MODULE tests/cuda_emulator/library.cpp)
  target_link_libraries(acc_emulator PRIVATE acc_pure acc_options)
  target_include_directories(acc_emulator SYSTEM PRIVATE "${ACC_TORCH_DIR}/include")
  target_compile_definitions(acc_emulator PRIVATE
    ACC_EMULATED_DEVICE="${CMAKE_SOURCE_DIR}/tests/cuda_emulator/device.h")
  set_target_properties(acc_emulator PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${ACC_OUTPUT_DIR}")
endif()

if(ACC_PCH AND EXISTS "${CMAKE_SOURCE_DIR}/csrc/aten/pch.h")
  target_precompile_headers(_C PRIVATE "${CMAKE_SOURCE_DIR}/csrc/aten/pch.h")
  if(ACC_CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(_C PRIVATE -fpch-preprocess)
  endif()
endif()
