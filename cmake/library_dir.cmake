# NVTE_EP_LIBRARY_DIR must hold what is offered and installed: else the build around this one would fail much later.

get_filename_component(NVTE_EP_LIBRARY_DIR "${NVTE_EP_LIBRARY_DIR}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
set(nvte_ep_missing "")
set(files libnvte_ep.so libnvte_ep_preload.so libnvte_ep_stub.so libnvte_ep_host.so nvte-ep)
if(NVTE_EP_INSTALL_TE_LIBRARY OR NVTE_EP_BUILD_TESTS)
  list(APPEND files libtransformer_engine.so)
endif()
foreach(file IN LISTS files)
  if(NOT EXISTS ${NVTE_EP_LIBRARY_DIR}/${file})
    list(APPEND nvte_ep_missing ${file})
  endif()
endforeach()
if(nvte_ep_missing)
  string(REPLACE ";" ", " nvte_ep_missing "${nvte_ep_missing}")
  message(FATAL_ERROR "nvte_ep: NVTE_EP_LIBRARY_DIR is ${NVTE_EP_LIBRARY_DIR}, where these files are missing: ${nvte_ep_missing}; "
    "build them (cargo build --release) and name cargo's folder, as in target/release, or leave NVTE_EP_LIBRARY_DIR out")
endif()
