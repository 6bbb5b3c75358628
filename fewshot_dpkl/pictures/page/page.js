"use strict";
const $ = id => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
let about, classes = [], queries = [], model = null, turn = 0, timer, unsaved = null, answered = null;

async function ask(path, body) {
  const response = await fetch(path, body === undefined ? {} : {method: "POST", body});
  if (path === "/model" && response.ok) return response.blob();
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").className = bad ? "bad" : "";
}

// Pictures: kept here, sent once for each backbone.

function count() { return classes.reduce((sum, each) => sum + each.pictures.length, queries.length); }

function addPictures(list, files) {
  for (const file of files) {
    if (count() >= about.limits.pictures) { say(`At most ${about.limits.pictures} pictures are taken.`, true); break; }
    list.push({file, url: URL.createObjectURL(file), ids: {}, why: null});
  }
  changed();
}

async function send(picture, backbone) {
  const most = about.limits.picture_bytes;
  try {
    if (picture.file.size > most) throw new Error(`more than ${Math.floor(most / 2 ** 20)} MB`);
    picture.ids[backbone] = (await ask("/picture?backbone=" + encodeURIComponent(backbone), picture.file)).id;
  } catch (error) {
    picture.why = error.message;
  }
}

// Dropped files and folders. A folder dropped on a class fills it; one that holds folders is a class for each.

const fileOf = entry => new Promise((resolve, reject) => entry.file(resolve, reject));

async function entriesOf(folder) {
  const reader = folder.createReader(), all = [];
  for (;;) {  // a browser gives at most a hundred at a time
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return all.filter(entry => !entry.name.startsWith(".")).sort((a, b) => a.name < b.name ? -1 : 1);
    all.push(...some);
  }
}

async function filesOf(entry) {
  if (entry.isFile) return [await fileOf(entry)];
  return (await Promise.all((await entriesOf(entry)).map(filesOf))).flat();
}

async function dropped(event, each) {
  const entries = [...event.dataTransfer.items].map(item => item.webkitGetAsEntry && item.webkitGetAsEntry());
  if (!entries.some(entry => entry && entry.isDirectory)) {
    return addPictures(each ? each.pictures : queries, [...event.dataTransfer.files]);
  }
  for (const entry of entries.filter(Boolean)) {
    const inside = entry.isDirectory && each ? (await entriesOf(entry)).filter(one => one.isDirectory) : [];
    if (inside.length) {  // a folder of classes
      for (const folder of inside) fillClass(folder.name, await filesOf(folder));
      continue;
    }
    const files = await filesOf(entry);
    if (each && entry.isDirectory && /^class \d+$/.test(each.name) && !each.pictures.length) each.name = fit(entry.name);
    addPictures(each ? each.pictures : queries, files);
  }
}

const fit = name => name.trim().slice(0, about.limits.name_length);

function fillClass(name, files) {
  let target = classes.find(each => each.name === fit(name));
  if (!target) {
    target = classes.find(each => !each.pictures.length && /^class \d+$/.test(each.name));
    if (!target) {
      if (classes.length >= about.limits.classes) return say(`At most ${about.limits.classes} classes are taken.`, true);
      classes.push(target = {name: "", pictures: []});
    }
    target.name = fit(name);
  }
  addPictures(target.pictures, files);
}

function acceptDrops(element, each) {
  element.ondragover = event => { event.preventDefault(); element.classList.add("over"); };
  element.ondragleave = () => element.classList.remove("over");
  element.ondrop = event => {
    event.preventDefault();
    element.classList.remove("over");
    dropped(event, each).catch(error => say(`The folder could not be read: ${error.message}`, true));
  };
}

// What is on the page.

function thumbs(list) {
  const row = make("div", {className: "thumbs"});
  for (const picture of list) {
    const image = make("img", {src: picture.url, alt: ""});
    image.onerror = () => image.replaceWith(picture.file.name.split(".").pop());
    const button = make("button", {type: "button", className: picture.why ? "thumb bad" : "thumb",
      title: `Remove ${picture.file.name}`, ariaLabel: `Remove ${picture.file.name}`}, image);
    button.onclick = () => { URL.revokeObjectURL(picture.url); list.splice(list.indexOf(picture), 1); changed(); };
    row.append(button);
  }
  const bad = list.filter(picture => picture.why);
  return [row, ...bad.map(picture => make("div", {className: "why"}, `${picture.file.name}: ${picture.why}`))];
}

function picker(list, text) {
  const input = make("input", {type: "file", multiple: true, accept: "image/*,.heic,.heif", className: "hidden", ariaLabel: text});
  input.onchange = () => addPictures(list, input.files);
  return make("label", {className: "pick"}, text, input);
}

const twice = each => classes.some(other => other !== each && other.name === each.name);

function drawClass(each, index) {
  const name = make("input", {value: each.name, maxLength: about.limits.name_length, ariaLabel: `Name of class ${index + 1}`,
    className: twice(each) ? "bad" : ""});
  name.onchange = () => { each.name = name.value.trim() || `class ${index + 1}`; changed(); };
  const remove = make("button", {type: "button", title: "Remove class", ariaLabel: `Remove ${each.name}`,
    disabled: classes.length <= 2}, "×");
  remove.onclick = () => { classes.splice(index, 1); changed(); };
  const card = make("div", {className: "card drop"}, make("div", {className: "row"}, name, remove),
    ...(twice(each) ? [make("div", {className: "why"}, `Another class is called ${each.name}.`)] : []),
    ...thumbs(each.pictures), picker(each.pictures, "Drop or choose pictures, or drop a folder"));
  acceptDrops(card, each);
  return card;
}

function drawModel() {
  const remove = make("button", {type: "button", title: "Remove model", ariaLabel: "Remove model"}, "×");
  remove.onclick = () => { model = null; changed(); };
  return make("div", {className: "card", id: "model"}, make("div", {className: "row"}, make("strong", {}, model.file), remove),
    make("div", {className: "hint"}, `${model.head} on ${model.backbone}: ${model.classes.join(", ")}`));
}

function draw() {
  $("classes").replaceChildren(...(model ? [drawModel()] : classes.map(drawClass)));
  $("query").replaceChildren(...thumbs(queries), picker(queries, "Drop or choose pictures to classify"));
  acceptDrops($("query"), null);
  $("add").disabled = Boolean(model) || classes.length >= about.limits.classes;
  $("backbone").disabled = Boolean(model);
  for (const box of document.querySelectorAll("#heads input")) box.disabled = Boolean(model);
}

const percent = value => (100 * value).toFixed(1) + " %";

function bars(names, p, spread, particles) {
  const order = names.map((_, index) => index).sort((a, b) => p[b] - p[a]).slice(0, 5);
  return order.map((c, rank) => {
    const fill = make("div", {className: "fill"}), track = make("div", {className: "track"}, fill);
    fill.style.width = percent(p[c]).replace(" ", "");
    if (particles > 1) {
      const whisker = make("div", {className: "whisker"});
      const low = Math.max(0, p[c] - spread[c]), high = Math.min(1, p[c] + spread[c]);
      whisker.style.left = 100 * low + "%";
      whisker.style.width = 100 * (high - low) + "%";
      track.append(whisker);
    }
    return make("div", {className: rank ? "bar" : "bar top"}, make("span", {title: names[c]}, names[c]), track,
      make("span", {}, percent(p[c])));
  });
}

function doubt(said, index, best) {
  const text = `Uncertainty ${percent(said.entropy[index])} of the largest possible (entropy)`;
  const strange = said.unfamiliarity ? ` More familiar: ${percent(said.unfamiliarity[index])} of known pictures.` : "";
  if (said.particles === 1) return text + "." + strange;
  return `${text}; ${said.particles} particles, ± ${(100 * said.spread[index][best]).toFixed(2)} points.` + strange;
}

const share = id => $(id).value === "" ? null : Math.min(1, Math.max(0, Number($(id).value)));

function labelOf(said, index, names) {
  const p = said.probabilities[index], best = p.indexOf(Math.max(...p));
  if (said.unfamiliarity && share("unknown") !== null && said.unfamiliarity[index] > 1 - share("unknown")) return "none of these";
  return p[best] < (share("threshold") || 0) ? "not sure" : names[best];
}

function show() {
  const {answer, shown} = answered;
  $("answers").replaceChildren(...shown.map((picture, index) => {
    const heads = Object.entries(answer.heads).map(([head, said]) => {
      const p = said.probabilities[index], best = p.indexOf(Math.max(...p)), label = labelOf(said, index, answer.classes);
      const says = make("div", {className: label === answer.classes[best] ? "says" : "says none"}, label + " ", make("span", {}, head));
      return make("div", {}, says, ...bars(answer.classes, p, said.spread[index], said.particles),
        make("div", {className: "doubt"}, doubt(said, index, best)));
    });
    const image = make("img", {src: picture.url, alt: ""});
    image.onerror = () => image.remove();
    return make("div", {className: "card answer"}, make("figure", {}, image, picture.file.name),
      make("div", {className: "heads"}, ...heads));
  }));
  const cannot = share("unknown") === null ? [] : Object.keys(answer.heads).filter(head => !answer.heads[head].unfamiliarity);
  if (cannot.length) $("answers").prepend(make("p", {className: "hint"}, `${cannot.join(", ")} cannot say “none of these”; use ${about.default}.`));
}
