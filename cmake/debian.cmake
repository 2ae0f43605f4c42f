# Run by cpack on the tree that becomes the Debian package: what Debian's policy asks for beyond what `cmake --install` puts
# there. lintian checks it (qa/L1_install).

set(share ${CPACK_TEMPORARY_DIRECTORY}/usr/share)
set(doc ${share}/doc/nvte-ep)

function(nvte_ep_gzip)
  execute_process(COMMAND gzip -9nf ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# SOURCE_DATE_EPOCH counts here, so that a release can be repeated.
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)
file(WRITE ${doc}/changelog "nvte-ep (${CPACK_PACKAGE_VERSION}) unstable; urgency=medium

  * Version ${CPACK_PACKAGE_VERSION}: see CHANGELOG.md.

 -- ${CPACK_PACKAGE_CONTACT}  ${date}
")
file(GLOB pages ${share}/man/man1/*.1)
nvte_ep_gzip(${doc}/changelog ${pages})

string(TIMESTAMP year "%Y" UTC)
file(WRITE ${doc}/copyright "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: nvte-ep
Source: ${CPACK_PACKAGE_HOMEPAGE_URL}

Files: *
Copyright: ${year} The nvte-ep developers
License: Apache-2.0
 The full text is in /usr/share/common-licenses/Apache-2.0.
Comment: THIRD_PARTY_LICENSES has the terms of the Rust crates that the binaries contain.
")

file(RENAME ${share}/zsh/site-functions/_nvte-ep ${share}/zsh/_nvte-ep)
file(REMOVE_RECURSE ${share}/zsh/site-functions)
file(MAKE_DIRECTORY ${share}/zsh/vendor-completions)
file(RENAME ${share}/zsh/_nvte-ep ${share}/zsh/vendor-completions/_nvte-ep)

file(WRITE ${share}/lintian/overrides/nvte-ep "# One package holds the libraries, their headers and the command: they are of one version, and of use together.
nvte-ep: link-to-shared-library-in-wrong-package
nvte-ep: package-name-doesnt-match-sonames
# CPack writes these scripts for every package with shared libraries.
nvte-ep: maintscript-calls-ldconfig
")
