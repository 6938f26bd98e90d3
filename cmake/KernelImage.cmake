# CUDA kernels, where there is a compiler for them: HP_HAS_CUDA, HP_CUDA_INCLUDE, hp_kernel_image.
set(HOTPLANE_CUDA_ARCHITECTURES "90a" CACHE STRING "GPUs to make kernels for, e.g. 90a;100a")
if(HOTPLANE_CUDA)
  find_program(HP_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(HP_NVCC)
    cmake_path(GET HP_NVCC PARENT_PATH HP_CUDA_BIN)
    find_path(HP_CUDA_INCLUDE cuda.h HINTS ${HP_CUDA_BIN}/../include)
  endif()
endif()
if(HOTPLANE_CUDA AND HP_NVCC AND HP_CUDA_INCLUDE)
  set(HP_HAS_CUDA TRUE)
endif()

# hp_kernel_image(<sources> SOURCE <file> ARRAY <name> [OPTIONS <of nvcc>] [DEPENDS <headers>]
# [ARCHITECTURES <some of HOTPLANE_CUDA_ARCHITECTURES>]):
# kernels are data to the C++ side, one image with the code of every GPU. Appends the C++ file of
# the array to the list <sources>; what ptxas says of registers and spills is in <image>.ptxas.
function(hp_kernel_image sources)
  cmake_parse_arguments(arg "" "SOURCE;ARRAY" "OPTIONS;DEPENDS;ARCHITECTURES" ${ARGN})
  if(NOT arg_ARCHITECTURES)
    set(arg_ARCHITECTURES ${HOTPLANE_CUDA_ARCHITECTURES})
  endif()
  set(gpus "")
  foreach(arch ${arg_ARCHITECTURES})
    list(APPEND gpus -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  cmake_path(GET arg_SOURCE STEM name)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${name})
  if(HOTPLANE_SANITIZE)
    # They run on the fake driver, which looks at no image.
    file(CONFIGURE OUTPUT ${image}.cc CONTENT "namespace hotplane {
extern const unsigned char ${arg_ARRAY}[];
alignas(64) const unsigned char ${arg_ARRAY}[] = \"none\";
}  // namespace hotplane
")
    set(${sources} ${${sources}} ${image}.cc PARENT_SCOPE)
    return()
  endif()
  add_custom_command(OUTPUT ${image}.cc
    COMMAND ${CMAKE_COMMAND} -DREPORT=${image}.ptxas
      -P ${PROJECT_SOURCE_DIR}/cmake/RunWithReport.cmake --
      ${HP_NVCC} -std=c++20 -O3 ${arg_OPTIONS} --expt-relaxed-constexpr -Xptxas -v
      -ccbin ${CMAKE_CXX_COMPILER} ${gpus} -fatbin -I${PROJECT_SOURCE_DIR}/src
      -o ${image}.fatbin ${CMAKE_CURRENT_SOURCE_DIR}/${arg_SOURCE}
    COMMAND ${CMAKE_COMMAND} -DINPUT=${image}.fatbin -DOUTPUT=${image}.cc -DNAME=${arg_ARRAY}
      -P ${PROJECT_SOURCE_DIR}/cmake/EmbedFile.cmake
    DEPENDS ${arg_SOURCE} ${arg_DEPENDS} ${PROJECT_SOURCE_DIR}/cmake/EmbedFile.cmake
    VERBATIM)
  set(${sources} ${${sources}} ${image}.cc PARENT_SCOPE)
endfunction()
