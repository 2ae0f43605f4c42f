"""Keeps of an abidw description what the exported functions mean: their symbols, prototypes and the types in these.

A Rust library's debug information describes the whole crate graph, and abidw takes all of it. Reads standard input, writes
standard output. Types are named by what they are, not by the order in which they were met, so that two builds of one
interface give one text.
"""

import sys
import xml.etree.ElementTree as xml

corpus = xml.parse(sys.stdin).getroot()
types = {element.get("id"): element for element in corpus.iter() if element.get("id")}
functions = {element.get("elf-symbol-id"): element for element in corpus.iter("function-decl") if element.get("elf-symbol-id")}
MEANING = {"parameter", "return", "data-member", "var-decl", "subrange", "underlying-type", "enumerator"}
PRIVATE = {"mangled-name", "filepath", "line", "column", "alignment-in-bits", "naming-typedef-id"}

names, order = {}, []


def name_of(type_id):
    """The number of a type, which is met on the way from the functions; its own types get theirs first."""
    if type_id not in names:
        names[type_id] = f"type-{len(names) + 1}"
        order.append(strip(types[type_id]))
    return names[type_id]


def strip(element):
    kept = xml.Element(element.tag, {k: v for k, v in element.attrib.items() if k not in PRIVATE})
    for reference in ("type-id", "size-type-id"):
        if reference in kept.attrib:
            kept.set(reference, name_of(kept.get(reference)))
    if "id" in kept.attrib:  # an array's bounds are written where they are used
        kept.set("id", names.setdefault(kept.get("id"), f"type-{len(names) + 1}"))
    kept.extend([strip(child) for child in element if child.tag in MEANING])
    return kept


symbols = corpus.find("elf-function-symbols")
exported = sorted(symbol.get("name") for symbol in symbols)
prototypes = [strip(functions[name]) for name in exported if name in functions]
missing = [name for name in exported if name not in functions]
if missing:
    sys.exit(f"no debug information for {', '.join(missing)}")

result = xml.Element("abi-corpus", {k: v for k, v in corpus.attrib.items() if k != "path"})
symbols[:] = sorted(symbols, key=lambda symbol: symbol.get("name"))
result.append(symbols)
unit = xml.SubElement(result, "abi-instr", {"version": "1.0", "address-size": "64", "path": "exported", "language": "LANG_Rust"})
unit.extend(order)
unit.extend(prototypes)
xml.indent(result, " ")
sys.stdout.write(xml.tostring(result, encoding="unicode") + "\n")
