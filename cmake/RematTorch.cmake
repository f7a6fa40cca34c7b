# SPDX-License-Identifier: MIT
#
# Included after find_package(Torch), here and by the installed package. Torch's configuration looks for
# its other half, Caffe2, in the system first: with two LibTorch on a machine, Torch_DIR alone gives the
# headers of one and the libraries of the other, and pages of undefined references.

if(DEFINED Torch_DIR AND DEFINED Caffe2_DIR)
  cmake_path(GET Torch_DIR PARENT_PATH remat_torch_half)
  cmake_path(GET Caffe2_DIR PARENT_PATH remat_caffe2_half)
  if(NOT remat_torch_half STREQUAL remat_caffe2_half)
    message(
      FATAL_ERROR
        "remat: the headers of LibTorch come from ${Torch_DIR}, but its libraries from ${Caffe2_DIR}. "
        "Put the folder of the LibTorch you want first in CMAKE_PREFIX_PATH; Torch_DIR alone is not "
        "enough. Configure in a fresh build folder.")
  endif()
endif()
