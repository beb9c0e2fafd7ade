// Conditions, as the library reads them (archive/index/expressions.py), for the rows of a page that was saved.

const TOKEN =
  /\s*(?:([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|([A-Za-z_][\w.-]*)|(==|!=|<=|>=|<>|[=<>(),])|(\S))/gy;
const WORDS = ["and", "or", "not", "in", "is", "null", "none", "true", "false"];
const CONSTANTS = { true: true, false: false, null: null, none: null };
const ALIASES = { update_count: "update_count_max", id: "episode_id", steps: "length" };
const COMPARE = {
  "=": (a, b) => a === b,
  "==": (a, b) => a === b,
  "!=": (a, b) => a !== b,
  "<>": (a, b) => a !== b,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};

/** f(row) of a condition: whether the row meets it, null where that is not known. column(name): f(row), or undefined. */
export function condition(text, column) {
  const parser = new Parser(text, column);
  const found = parser.any();
  if (parser.at < parser.tokens.length) parser.fail(`has ${parser.tokens[parser.at].text} where it should end`);
  return truth(found);
}

class Parser {
  constructor(text, column) {
    Object.assign(this, { text, column, at: 0 });
    this.tokens = Array.from(text.matchAll(TOKEN), ([, number, string, name, sign, bad]) => {
      if (bad !== undefined) this.fail(`has ${bad}, which means nothing here`);
      if (name !== undefined && WORDS.includes(name.toLowerCase())) return { kind: "sign", text: name.toLowerCase() };
      if (sign !== undefined) return { kind: "sign", text: sign };
      if (name !== undefined) return { kind: "name", text: name };
      const value = number === undefined ? string.slice(1, -1).replace(/\\(.)/gs, "$1") : Number(number);
      return { kind: "value", text: number ?? string, value };
    });
    if (!this.tokens.length) this.fail("is empty");
  }

  fail(what) {
    throw Object.assign(new Error(`the condition ${JSON.stringify(this.text)} ${what}`), { status: 400 });
  }

  accept(...signs) {
    const { kind, text } = this.tokens[this.at] ?? {};
    if (kind !== "sign" || !signs.includes(text)) return "";
    this.at += 1;
    return text;
  }

  expect(sign, otherwise) {
    if (!this.accept(sign)) this.fail(otherwise);
  }

  any() {
    let left = this.all();
    while (this.accept("or")) left = joined(truth(left), truth(this.all()), true);
    return left;
  }

  all() {
    let left = this.negated();
    while (this.accept("and")) left = joined(truth(left), truth(this.negated()), false);
    return left;
  }

  negated() {
    return this.accept("not") ? not(truth(this.negated())) : this.comparison();
  }

  comparison() {
    if (this.accept("(")) {
      const inside = this.any();
      this.expect(")", "lacks a closing parenthesis");
      return inside;
    }
    const left = this.operand();
    if (this.accept("is")) {
      const negate = this.accept("not");
      if (!this.accept("null", "none")) this.fail("has 'is' without 'null'");
      return (row) => (left(row) === null) !== Boolean(negate);
    }
    const negate = this.accept("not");
    if (this.accept("in")) return negate ? not(this.among(left)) : this.among(left);
    if (negate) this.fail("has 'not' without 'in'");
    const sign = this.accept(...Object.keys(COMPARE));
    if (!sign) return left;
    const right = this.operand();
    return (row) => compared(COMPARE[sign], left(row), right(row));
  }

  among(left) {
    this.expect("(", "lacks a parenthesis after 'in'");
    const members = [this.operand()];
    while (this.accept(",")) members.push(this.operand());
    this.expect(")", "lacks a closing parenthesis");
    return (row) =>
      members.map((one) => compared(COMPARE["="], left(row), one(row))).find(Boolean) ??
      (left(row) === null ? null : false);
  }

  operand() {
    const token = this.tokens[this.at];
    this.at += 1;
    if (token?.kind === "value") return () => token.value;
    if (token?.kind === "sign" && token.text in CONSTANTS) return () => CONSTANTS[token.text];
    const found =
      token?.kind === "name" && this.column(Object.hasOwn(ALIASES, token.text) ? ALIASES[token.text] : token.text);
    if (!found) this.fail(token ? `has ${token.text}, which is no column of this page and no value` : "ends too early");
    return found;
  }
}

// what is not known of a part is not known of the whole, unless the rest decides it
function joined(left, right, deciding) {
  return (row) => {
    const [a, b] = [left(row), right(row)];
    if (a === deciding || b === deciding) return deciding;
    return a === null || b === null ? null : !deciding;
  };
}

function not(inside) {
  return (row) => (inside(row) === null ? null : !inside(row));
}

function truth(operand) {
  return (row) => (operand(row) === null ? null : operand(row) === true);
}

function compared(compare, a, b) {
  return a === null || b === null || typeof a !== typeof b ? null : compare(a, b);
}
