# `cpack -G DEB` in the build folder: one Debian package of everything that is installed. packaging/dist.sh runs it on a
# release build.

set(CPACK_PACKAGE_NAME nvte-ep)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_VENDOR "The nvte-ep developers")
set(CPACK_PACKAGE_CONTACT "The nvte-ep developers <nvte-ep@users.noreply.github.com>")
set(CPACK_PACKAGE_HOMEPAGE_URL "https://github.com/nvte-ep/nvte-ep")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "expert-parallel dispatch and combine for Mixture-of-Experts models")
set(CPACK_PACKAGE_DESCRIPTION
  "The interface nvte_ep_* of TransformerEngine over NCCL EP, as a shared\nlibrary of its own, with headers, the host runtime, \
which runs programs\nwithout a GPU, and the command nvte-ep.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
# NCCL and NCCL EP are loaded at run time, from a wheel as well as from a package, so they are no dependencies.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# For dpkg: renew the loader's cache. For the dpkg-shlibdeps of packages that link us: what to depend on.
file(WRITE ${PROJECT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
set(shlibs "")
foreach(library libnvte_ep libnvte_ep_preload libnvte_ep_host)
  string(APPEND shlibs "${library} 1 nvte-ep (>= ${PROJECT_VERSION})\n")
endforeach()
file(WRITE ${PROJECT_BINARY_DIR}/debian/shlibs "${shlibs}")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/triggers ${PROJECT_BINARY_DIR}/debian/shlibs)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/debian.cmake)
set(CPACK_STRIP_FILES OFF)
include(CPack)
