#include "engine/report_page.h"

#include <algorithm>

#include "base/format_text.h"

namespace hotplane {
namespace {

constexpr std::string_view kStyle = R"(
:root{--page:#f6f7f8;--card:#fff;--text:#1b1f24;--soft:#5b6470;--line:#dfe3e8;--track:#e9ecf0;
--read:#2f74d0;--verify:#2a9d6a;--publish:#1b1f24;--quantize:#d97a1f;--allocate:#8a77c9;
--plan:#c2418f;--file:#7d5a3c;--wait:#c9a400;--skip:#aab3bd;--warn:#b45309;--warnpage:#fff6e5}
@media(prefers-color-scheme:dark){:root{--page:#121417;--card:#1b1e23;--text:#e8eaed;
--soft:#9aa4b0;--line:#30353d;--track:#2a2f36;--read:#5b9cf0;--verify:#45c08a;--publish:#f1f3f5;
--quantize:#f09a4b;--allocate:#a796e3;--plan:#e36ab4;--file:#c69c72;--wait:#e0c341;--skip:#5d6772;
--warn:#f5b861;--warnpage:#2e2617}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1160px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;font-weight:650;letter-spacing:-.01em}
h2{font-size:16px;margin:0 0 12px;font-weight:650}
p{margin:0 0 10px}.soft{color:var(--soft)}
.mono{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:13px;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;
margin-top:16px;break-inside:avoid}
.long{break-inside:auto}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:16px;margin-top:20px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.tile b{display:block;font-size:25px;line-height:1.25;font-weight:650;letter-spacing:-.01em}
.tile span{color:var(--soft);font-size:13px}.tile i{display:block;height:6px;border-radius:3px;
background:var(--track);margin:8px 0 6px;overflow:hidden}
.tile i u{display:block;height:100%;background:var(--verify)}
.two{display:grid;grid-template-columns:1fr 1fr;gap:16px}.two section{min-width:0}
.two table{align-self:start}.wide{gap:40px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500;text-align:left;font-size:13px}
th,td{padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
.n{text-align:right;white-space:nowrap}td.n:last-child,th.n:last-child{padding-right:0}
svg{display:block;width:100%;height:auto}svg text{fill:var(--soft);font-size:11px;
font-family:inherit}svg .grid{stroke:var(--line)}svg .strong{fill:var(--text)}
.read{fill:var(--read);background:var(--read)}.verify{fill:var(--verify);background:var(--verify)}
.publish{fill:var(--publish);background:var(--publish)}
.quantize{fill:var(--quantize);background:var(--quantize)}
.allocate{fill:var(--allocate);background:var(--allocate)}
.plan{fill:var(--plan);background:var(--plan)}.file{fill:var(--file);background:var(--file)}
.wait{fill:var(--wait);background:var(--wait)}
.skip{fill:var(--skip);background:var(--skip)}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4;stroke-width:1.5}
.stroke-read{stroke:var(--read)}.stroke-verify{stroke:var(--verify)}
.stroke-quantize{stroke:var(--quantize)}.stroke-publish{stroke:var(--publish)}
svg .axis{stroke:var(--soft)}.track{fill:var(--track)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 10px;font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;
vertical-align:-1px;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.bar{display:flex;height:22px;border-radius:5px;overflow:hidden;background:var(--track);
margin-bottom:12px}.bar i{display:block;min-width:2px}
.bar i,.tile i,.tile u,svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.warn{background:var(--warnpage);border-color:var(--warn)}.warn h2{color:var(--warn)}
ul{margin:0;padding-left:20px}li{margin:3px 0;overflow-wrap:anywhere}
.columns{columns:2;column-gap:36px}.columns table{break-inside:auto}
footer{color:var(--soft);font-size:13px;margin-top:18px}
@media(max-width:820px){.tiles{grid-template-columns:1fr 1fr}.two{grid-template-columns:1fr}}
@media print{body{background:#fff;font-size:12px}main{max-width:none;padding:0}
.tiles{gap:8px}.tile b{font-size:19px}section,.tile{border-color:#bbb}}
)";

}  // namespace

// Text of others, safe in content and in quoted attributes, cut between characters.
std::string Escape(std::string_view text, size_t bytes_max) {
  std::string out;
  const bool cut = text.size() > bytes_max;
  size_t end = std::min(text.size(), bytes_max);
  while (cut && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  for (const char c : text.substr(0, end)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default:
        // Control characters have no place in HTML.
        if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f) {
          out += "\xef\xbf\xbd";
        } else {
          out += c;
        }
    }
  }
  if (cut) out += " ...";
  return out;
}

std::string PageHead(const std::string& title) {
  const std::string text = Escape(title);
  return Text(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n"
      "<title>hotplane {}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n<h1>{}</h1>\n",
      text, kStyle, text);
}

std::string PageFoot(const std::string& what) {
  return Text(
      "<footer>Made by hotplane {} from {}. The page needs nothing but itself."
      "</footer>\n</main>\n</body>\n</html>\n",
      HOTPLANE_VERSION_TEXT, what);
}

std::string PageLegend(const std::vector<PageKind>& kinds) {
  std::string out = "<p class=\"legend\">";
  for (const PageKind& kind : kinds)
    out += Text("<span><i class=\"{}\"></i>{}</span>", kind.css, Escape(kind.name));
  return out + "</p>\n";
}

}  // namespace hotplane
