# What `cmake --install` puts below the prefix. The tree can be moved afterwards: nothing in it names the prefix.
#
#   lib/       libnvte_ep.so.1, libnvte_ep_preload.so.1, libnvte_ep_host.so.1, and their links for linking
#   lib/nvte_ep/te/            libtransformer_engine.so, in a folder of its own so that nobody finds it unasked
#   lib/nvte_ep/host_runtime/  the host runtime under the names of CUDA's and NCCL's libraries
#   include/nvte_ep, include/nvte_ep_host, bin/nvte-ep, lib/cmake/nvte_ep, lib/pkgconfig

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# nvte_ep_install_library(FILE NAME): FILE as NAME.so.1, and the link NAME.so.
function(nvte_ep_install_library file name)
  install(PROGRAMS ${nvte_ep_library_dir}/${file} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${name}.so.1)
  nvte_ep_install_link(${name}.so.1 ${CMAKE_INSTALL_LIBDIR}/${name}.so)
endfunction()

# nvte_ep_install_link(TARGET PATH): a symbolic link at PATH below the prefix. At install time, so that DESTDIR counts.
function(nvte_ep_install_link target path)
  install(CODE "
    set(link \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${path}\")
    get_filename_component(folder \"\${link}\" DIRECTORY)
    file(MAKE_DIRECTORY \"\${folder}\")
    file(CREATE_LINK \"${target}\" \"\${link}\" SYMBOLIC)
    message(STATUS \"Installing: \${link} -> ${target}\")")
endfunction()

if(NVTE_EP_WITH_NCCL_EP)
  nvte_ep_install_library(libnvte_ep.so libnvte_ep)
else()
  message(STATUS "nvte_ep: NVTE_EP_WITH_NCCL_EP is OFF, so the stub is installed as libnvte_ep.so.1")
  nvte_ep_install_library(libnvte_ep_stub.so libnvte_ep)
endif()
nvte_ep_install_library(libnvte_ep_preload.so libnvte_ep_preload)
nvte_ep_install_library(libnvte_ep_host.so libnvte_ep_host)
install(PROGRAMS ${nvte_ep_library_dir}/libtransformer_engine.so DESTINATION ${CMAKE_INSTALL_LIBDIR}/nvte_ep/te)
# Each library looks for the host runtime beside itself.
nvte_ep_install_link(../../libnvte_ep_host.so.1 ${CMAKE_INSTALL_LIBDIR}/nvte_ep/te/libnvte_ep_host.so)
foreach(name libcuda.so.1 libcudart.so.12 libcudart.so.13 libnccl.so.2 libnccl_ep.so.0)
  nvte_ep_install_link(../../libnvte_ep_host.so.1 ${CMAKE_INSTALL_LIBDIR}/nvte_ep/host_runtime/${name})
endforeach()
install(PROGRAMS ${nvte_ep_library_dir}/nvte-ep DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/nvte_ep)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/nvte_epConfig.cmake.in ${PROJECT_BINARY_DIR}/nvte_epConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/nvte_epConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/nvte_epConfig.cmake ${PROJECT_BINARY_DIR}/nvte_epConfigVersion.cmake
  DESTINATION ${package_dir})

file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/nvte_ep.pc.in ${PROJECT_BINARY_DIR}/nvte_ep.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/nvte_ep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
