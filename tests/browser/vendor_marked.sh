#!/bin/sh
# Make session_server/web/static/vendor/marked_lexer.js again: marked's lexer alone, from the sources in
# npm's package, without its parser, its renderers and their HTML. `git diff` shows whether it is the same.
set -e
MARKED=${MARKED:-18.2.1}
ESBUILD=${ESBUILD:-0.25.12}
place=$(cd "$(dirname "$0")/../../session_server/web/static/vendor" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --prefix . "marked@$MARKED" "esbuild@$ESBUILD"
node -e '
const { readFileSync, writeFileSync } = require("node:fs");
const { sources, sourcesContent } = JSON.parse(readFileSync("node_modules/marked/lib/marked.esm.js.map"));
sources.forEach((path, at) => writeFileSync(path.replace(/.*src\//, ""), sourcesContent[at]));
writeFileSync("entry.ts", "export { _Lexer as Lexer } from \"./Lexer.ts\"; export { _Tokenizer as Tokenizer } from \"./Tokenizer.ts\";");
'
cp node_modules/marked/LICENSE "$place/marked.LICENSE"
node_modules/.bin/esbuild entry.ts --bundle --minify --format=esm --target=es2022 --log-level=error \
	--banner:js="/*! The lexer of marked $MARKED, (c) 2018+ MarkedJS, (c) 2011-2018 Christopher Jeffrey. MIT, see marked.LICENSE. */" \
	--outfile="$place/marked_lexer.js"
