# The CUDA half: a library of its own, built where nvcc is found, so that the
# portable core never depends on CUDA. It links cudart statically; the driver is
# found at run time.
find_program(TURBOBUS_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME
  PATHS /usr/local/cuda/bin PATH_SUFFIXES bin)
if(NOT TURBOBUS_NVCC OR TURBOBUS_SANITIZE)
  message(STATUS "CUDA half: not built (nvcc: ${TURBOBUS_NVCC})")
  return()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${TURBOBUS_NVCC})
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Machine code for the GPUs we know, PTX for newer ones.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(WARNING "CUDA half: not built, because ${TURBOBUS_NVCC} compiles nothing")
  return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

file(GLOB cuda_kernels CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_SOURCE_DIR}/transport/cuda/*.cu ${CMAKE_CURRENT_SOURCE_DIR}/moe/cuda/*.cu)
add_library(turbobus_cuda_kernels STATIC ${cuda_kernels})
target_include_directories(turbobus_cuda_kernels PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
# The standard by its flag: CMake before 3.28 does not know C++20 of new nvccs.
set_target_properties(turbobus_cuda_kernels PROPERTIES CUDA_STANDARD_REQUIRED OFF)
target_compile_options(turbobus_cuda_kernels PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror>)

file(GLOB cuda_moe_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/moe/cuda/*.cc)
list(FILTER cuda_moe_sources EXCLUDE REGEX "_test\\.cc$")
add_library(turbobus_cuda_moe STATIC ${cuda_moe_sources})
target_include_directories(turbobus_cuda_moe SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(turbobus_cuda_moe PUBLIC turbobus_cuda_transport turbobus_cuda_kernels
  turbobus_moe CUDA::cudart_static)

file(GLOB cuda_transport_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/transport/cuda/*.cc)
list(FILTER cuda_transport_sources EXCLUDE REGEX "_test\\.cc$")
add_library(turbobus_cuda_transport STATIC ${cuda_transport_sources})
target_include_directories(turbobus_cuda_transport SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(turbobus_cuda_transport PUBLIC turbobus_cuda_kernels turbobus_transport
  CUDA::cudart_static)

# tb_cuda_test(<name> <file> LIBS <library>...): a test that runs on GPUs, and skips itself
# where there is none.
function(tb_cuda_test name file)
  cmake_parse_arguments(ARG "" "" "LIBS" ${ARGN})
  add_executable(${name} ${file})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} CUDA::cudart_static GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
endfunction()
if(TURBOBUS_TESTS)
  file(GLOB cuda_moe_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/moe/cuda/*_test.cc)
  foreach(test IN LISTS cuda_moe_tests)
    get_filename_component(stem ${test} NAME_WE)
    tb_cuda_test(moe_cuda_${stem} ${test} LIBS turbobus_cuda_moe)
  endforeach()
  file(GLOB cuda_transport_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/transport/cuda/*_test.cc)
  foreach(test IN LISTS cuda_transport_tests)
    get_filename_component(stem ${test} NAME_WE)
    tb_cuda_test(transport_cuda_${stem} ${test} LIBS turbobus_cuda_transport)
  endforeach()
  file(GLOB cuda_engine_tests CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/engine/cuda/*_test.cc)
  foreach(test IN LISTS cuda_engine_tests)
    get_filename_component(stem ${test} NAME_WE)
    tb_cuda_test(engine_cuda_${stem} ${test} LIBS turbobus_engine turbobus_cuda_transport)
  endforeach()
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_SOURCE_DIR}/ffi/cuda/*.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/python/cuda/*.cc)
list(FILTER cuda_sources EXCLUDE REGEX "_test\\.cc$")
pybind11_add_module(_cuda ${cuda_sources}
  ${CMAKE_CURRENT_SOURCE_DIR}/ffi/offload_buffer.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/ffi/moe_checks.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/ffi/moe_decode.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/python/exchange_traffic.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/python/raise.cc)
target_include_directories(_cuda SYSTEM PRIVATE ${JAXLIB_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
target_include_directories(_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(_cuda PRIVATE turbobus_cuda_moe turbobus_cuda_transport turbobus_engine turbobus_moe
  turbobus_offload CUDA::cudart_static)
target_link_options(_cuda PRIVATE ${TURBOBUS_MODULE_LINK_OPTIONS})
install(TARGETS _cuda DESTINATION jax_turbobus)
