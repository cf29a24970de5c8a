#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

// cublasLt as its header describes it, for float matrices in the host's memory: what the library is
// told decides what is computed, so that a leading dimension, a transposition or an epilogue that
// is wrong gives wrong numbers. One per process.
namespace acc::testing {

struct FakeCublasLt {
  int algorithms = 3;           // that the heuristic names: numbers 0, 1, ...
  int refused = -1;             // the one that fails when it is run
  std::vector<int> run;         // the numbers of those that were run
  int asked = 0;                // calls of the heuristic
  uint32_t reduction_mask = 0;  // as the last of these was told
  uint64_t workspace = 0;
  // That the heuristic was told of, of a, b, c, d: with others its algorithms do not run. What an
  // epilogue reads or writes is to be aligned like d, and at least to 16 bytes.
  std::array<uint32_t, 4> alignments{};
};

inline FakeCublasLt& fake_cublaslt() {
  static FakeCublasLt state;
  return state;
}

struct FakeLayout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t leading;
  // Column by column.
  size_t at(uint64_t row, uint64_t column) const {
    return static_cast<size_t>(column) * static_cast<size_t>(leading) + static_cast<size_t>(row);
  }
};

struct FakeDescriptor {
  cublasComputeType_t compute;
  int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  float* bias = nullptr;
  float* aux = nullptr;
  int64_t ld_aux = 0;
  int32_t bias_type = -1;
};

inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

inline double gelu_slope(double x) {
  const double inner = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  const double t = std::tanh(inner);
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

}  // namespace acc::testing

extern "C" {

using acc::testing::fake_cublaslt;
using acc::testing::FakeDescriptor;
using acc::testing::FakeLayout;

inline const char* fake_status_string(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "refused";
}

const char* cublasLtGetStatusString(cublasStatus_t status) { return fake_status_string(status); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new FakeDescriptor{.compute = compute});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t descriptor) {
  delete reinterpret_cast<FakeDescriptor*>(descriptor);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t descriptor,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  auto* d = reinterpret_cast<FakeDescriptor*>(descriptor);
  const auto take = [&](auto* field) {
    if (bytes != sizeof *field) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(&d->transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(&d->transpose_b);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take(&d->epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(&d->bias);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return take(&d->bias_type);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return take(&d->aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return take(&d->ld_aux);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType_t type,
                                          uint64_t rows, uint64_t columns, int64_t leading) {
  if (leading < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(new FakeLayout{type, rows, columns, leading});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<FakeLayout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<char*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  auto& fake = fake_cublaslt();
  const auto take = [&](auto* field) {
    if (bytes != sizeof *field) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  uint32_t other = 0;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take(&fake.workspace);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return take(&fake.reduction_mask);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return take(&fake.alignments[0]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return take(&fake.alignments[1]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return take(&fake.alignments[2]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return take(&fake.alignments[3]);
    default:
      return take(&other);
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t found[], int* count) {
  ++fake_cublaslt().asked;
  *count = std::min(wanted, fake_cublaslt().algorithms);
  for (int i = 0; i < *count; ++i) {
    found[i] = {};
    found[i].state = CUBLAS_STATUS_SUCCESS;
    found[i].algo.data[0] = static_cast<uint64_t>(i);
    for (size_t k = 0; k < 4; ++k) found[i].algo.data[k + 1] = fake_cublaslt().alignments[k];
  }
  return *count > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t descriptor, const void* alpha,
                              const void* a_data, cublasLtMatrixLayout_t a_layout,
                              const void* b_data, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void*, cublasLtMatrixLayout_t, void* d_data,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void*, size_t, cudaStream_t) {
  const auto number = static_cast<int>(algo->data[0]);
  fake_cublaslt().run.push_back(number);
  if (number == fake_cublaslt().refused) return CUBLAS_STATUS_NOT_SUPPORTED;
  const void* const matrices[] = {a_data, b_data, d_data, d_data};
  for (size_t k = 0; k < 4; ++k) {
    if (reinterpret_cast<uintptr_t>(matrices[k]) % algo->data[k + 1] != 0) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
  }
  const auto& call = *reinterpret_cast<FakeDescriptor*>(descriptor);
  const auto misaligned = [&](const float* beside_d) {
    return reinterpret_cast<uintptr_t>(beside_d) % std::max<uint64_t>(algo->data[4], 16) != 0;
  };
  const bool has_aux = (call.epilogue & 128) != 0;
  const bool has_bias = (call.epilogue & (CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_BGRADB)) != 0;
  if ((has_bias && misaligned(call.bias)) || (has_aux && misaligned(call.aux))) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const auto& a = *reinterpret_cast<FakeLayout*>(a_layout);
  const auto& b = *reinterpret_cast<FakeLayout*>(b_layout);
  const auto& d = *reinterpret_cast<FakeLayout*>(d_layout);
  if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0 ||
      a.type != CUDA_R_32F || b.type != CUDA_R_32F || d.type != CUDA_R_32F) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const auto read = [](const void* data, const FakeLayout& layout, int32_t transposed, uint64_t row,
                       uint64_t column) {
    if (transposed == CUBLAS_OP_T) std::swap(row, column);
    return static_cast<double>(static_cast<const float*>(data)[layout.at(row, column)]);
  };
  const uint64_t terms = call.transpose_a == CUBLAS_OP_T ? a.rows : a.columns;
  const bool fits = (call.transpose_a == CUBLAS_OP_T ? a.columns : a.rows) == d.rows &&
                    (call.transpose_b == CUBLAS_OP_T ? b.rows : b.columns) == d.columns &&
                    (call.transpose_b == CUBLAS_OP_T ? b.columns : b.rows) == terms;
  if (!fits) return CUBLAS_STATUS_INVALID_VALUE;
  if (has_aux && (call.ld_aux % 8 != 0 || call.ld_aux < static_cast<int64_t>(d.rows))) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  auto* made = static_cast<float*>(d_data);
  for (uint64_t row = 0; row < d.rows; ++row) {
    for (uint64_t column = 0; column < d.columns; ++column) {
      double sum = 0;
      for (uint64_t k = 0; k < terms; ++k) {
        sum += read(a_data, a, call.transpose_a, row, k) *
               read(b_data, b, call.transpose_b, k, column);
      }
      const size_t aux = static_cast<size_t>(column) * static_cast<size_t>(call.ld_aux) + row;
      switch (call.epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT:
        case CUBLASLT_EPILOGUE_BGRADB:
          break;
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
          sum += call.bias[row];
          call.aux[aux] = static_cast<float>(sum);
          sum = acc::testing::gelu(sum);
          break;
        case CUBLASLT_EPILOGUE_DGELU:
          sum *= acc::testing::gelu_slope(call.aux[aux]);
          break;
        default:
          return CUBLAS_STATUS_NOT_SUPPORTED;
      }
      made[d.at(row, column)] = static_cast<float>(sum);
    }
  }
  if (call.epilogue == CUBLASLT_EPILOGUE_BGRADB) {
    for (uint64_t column = 0; column < d.columns; ++column) {
      double sum = 0;
      for (uint64_t k = 0; k < terms; ++k) sum += read(b_data, b, call.transpose_b, k, column);
      call.bias[column] = static_cast<float>(sum);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
