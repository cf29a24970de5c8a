# Uses ccache where it is installed. The settings are those without which a compile that uses a
# precompiled header is never a hit.
find_program(ACC_CCACHE ccache)
if(ACC_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND}" -E env
    "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
    "${ACC_CCACHE}")
endif()
