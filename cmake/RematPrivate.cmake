# SPDX-License-Identifier: MIT
#
# What the tests, examples and benchmarks share. Nothing here reaches the users of remat::remat.
#
#   remat::private   INTERFACE target: the library with our warnings
#   remat::paper     INTERFACE target: the header folder and our warnings, without LibTorch
#   remat_torch_version, remat_torch_dirs   the LibTorch in use and its include folders

include_guard(GLOBAL)

add_library(remat_warnings INTERFACE)
target_compile_options(
  remat_warnings INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow
                           $<$<BOOL:${REMAT_WARNINGS_AS_ERRORS}>:-Werror>)

add_library(remat_private INTERFACE)
add_library(remat::private ALIAS remat_private)
target_link_libraries(remat_private INTERFACE remat remat_warnings)

add_library(remat_paper INTERFACE)
add_library(remat::paper ALIAS remat_paper)
target_compile_features(remat_paper INTERFACE cxx_std_20)
target_include_directories(remat_paper INTERFACE "${PROJECT_SOURCE_DIR}/include")
target_link_libraries(remat_paper INTERFACE remat_warnings)

get_target_property(remat_torch_dirs torch INTERFACE_INCLUDE_DIRECTORIES)
set(remat_torch_version "${Torch_VERSION}")
