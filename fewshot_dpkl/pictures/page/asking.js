// Asking, shortly after the last change.

function changed() {
  draw();
  turn++;
  document.body.dataset.state = "busy";
  $("save").disabled = $("saved").disabled = $("csv").disabled = true;
  answered = null;
  clearTimeout(timer);
  timer = setTimeout(() => refresh(turn).catch(error => {
    $("answers").replaceChildren();
    say(error.message, true);
    document.body.dataset.state = "failed";
  }), 150);
  keep();
}

function waitFor(text, bad = false) {
  $("answers").replaceChildren();
  say(text, bad);
  document.body.dataset.state = "waiting";
}

async function refresh(mine, again = true) {
  const backbone = model ? model.backbone : $("backbone").value;
  const heads = [...document.querySelectorAll("#heads input:checked")].map(input => input.value);
  const all = [...(model ? [] : classes.flatMap(each => each.pictures)), ...queries];
  const pending = all.filter(picture => !picture.ids[backbone] && !picture.why);
  for (const [number, picture] of pending.entries()) {
    say(`Reading pictures: ${number + 1} of ${pending.length} …`);
    await send(picture, backbone);
    if (mine !== turn) return;
  }
  if (pending.some(picture => picture.why)) draw();
  const good = list => list.filter(picture => picture.ids[backbone]);
  const ids = list => good(list).map(picture => picture.ids[backbone]);
  const filled = classes.filter(each => good(each.pictures).length);
  const shown = good(queries);
  if (!model) {
    if (!heads.length) return waitFor("Choose a head.");
    const same = classes.find(twice);
    if (same) return waitFor(`Two classes are called ${same.name}: give every class a name of its own.`, true);
    if (filled.length < 2) return waitFor("Give at least two classes a picture each.");
    const empty = classes.filter(each => each.pictures.length && !good(each.pictures).length);
    if (empty.length) return waitFor(`No picture of ${empty[0].name} can be read: give it another, or remove the class.`, true);
  }
  const question = model ? {backbone, model: model.id, queries: ids(queries)} : {backbone, heads, queries: ids(queries),
    classes: filled.map(each => ({name: each.name, pictures: ids(each.pictures)}))};
  question.unfamiliar = share("unknown") !== null;
  question.transductive = $("transductive").checked;
  if (!model) offerSaving(question, heads);
  if (!shown.length) return waitFor(model ? "Give a picture to classify." : "Give a picture to classify, or save the model.");
  say("Classifying …");
  const answer = await ask("/classify", JSON.stringify(question));
  if (mine !== turn) return;
  if (answer.missing) {  // forgotten there: send again, once
    for (const picture of all) if (answer.missing.includes(picture.ids[backbone])) delete picture.ids[backbone];
    if (again) return refresh(mine, false);
    throw new Error("The pictures could not be kept; try with fewer.");
  }
  answered = {answer, shown};
  show();
  $("csv").disabled = false;
  say(`${shown.length} of ${queries.length} pictures classified into ${answer.classes.length} classes.`);
  document.body.dataset.state = "ready";
  keep();
}

function offerSaving(question, heads) {
  unsaved = question;
  const before = $("saved").value || about.default;
  $("saved").replaceChildren(...heads.map(head => make("option", {selected: head === before}, head)));
  $("save").disabled = $("saved").disabled = false;
}

function download(content, name) {
  const url = URL.createObjectURL(content), link = make("a", {href: url, download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

$("save").onclick = async () => {
  const head = $("saved").value;
  try {
    download(await ask("/model", JSON.stringify({...unsaved, heads: [head]})), `${head}.safetensors`);
    say(`Saved ${head}.safetensors; use it with fewshot-dpkl classify --model, or load it here.`);
  } catch (error) {
    say(error.message, true);
  }
};

$("load").onchange = async () => {
  const file = $("load").files[0];
  $("load").value = "";
  try {
    if (file.size > about.limits.model_bytes) throw new Error(`${file.name} is too long for a model.`);
    model = {...await ask("/load", file), file: file.name};
    for (const picture of queries) picture.why = null;
    changed();
  } catch (error) {
    say(`${file.name}: ${error.message.replace(/^\S*the model /, "it ")}`, true);
  }
};

function csv() {
  const {answer, shown} = answered, quote = text => /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const lines = [["picture", "head", "label", "probability", "unfamiliarity", ...answer.classes.map(name => `p(${name})`)]];
  shown.forEach((picture, index) => Object.entries(answer.heads).forEach(([head, said]) => {
    const p = said.probabilities[index], strange = said.unfamiliarity ? said.unfamiliarity[index] : "";
    lines.push([picture.file.name, head, labelOf(said, index, answer.classes), Math.max(...p), strange, ...p]);
  }));
  return lines.map(line => line.map(cell => quote(String(cell))).join(",") + "\n").join("");
}

$("csv").onclick = () => download(new Blob([csv()], {type: "text/csv"}), "answers.csv");
$("threshold").oninput = () => { if (answered) show(); keep(); };
$("unknown").oninput = () => changed();
$("transductive").onchange = () => changed();
$("again").onclick = () => { restore(null); changed(); };

$("add").onclick = () => {
  let number = classes.length + 1;
  while (classes.some(each => each.name === `class ${number}`)) number++;
  classes.push({name: `class ${number}`, pictures: []});
  changed();
};

// What a reload brings back, from this browser's own store; of another run of the program it is thrown away.

const store = new Promise(resolve => {
  const request = indexedDB.open("fewshot-dpkl", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("page");
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => resolve(null);  // a private window: then a reload forgets
});

const stored = (mode, act) => store.then(open => open && new Promise(resolve => {
  const request = act(open.transaction("page", mode).objectStore("page"));
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => resolve(null);
}));

function keep() {
  const plain = list => list.map(({file, ids}) => ({file, ids}));
  const heads = [...document.querySelectorAll("#heads input:checked")].map(input => input.value);
  const state = {run: about.run, heads, backbone: $("backbone").value, threshold: $("threshold").value, unknown: $("unknown").value, transductive: $("transductive").checked,
    model, classes: classes.map(({name, pictures}) => ({name, pictures: plain(pictures)})), queries: plain(queries)};
  stored("readwrite", page => page.put(state, "state"));
}

function restore(state) {
  const whole = list => list.map(({file, ids}) => ({file, ids, url: URL.createObjectURL(file), why: null}));
  classes = state ? state.classes.map(({name, pictures}) => ({name, pictures: whole(pictures)}))
    : ["class 1", "class 2"].map(name => ({name, pictures: []}));
  queries = state ? whole(state.queries) : [];
  model = state ? state.model : null;
  $("threshold").value = state ? state.threshold : 0;
  $("unknown").value = state ? state.unknown : "";
  $("transductive").checked = Boolean(state && state.transductive);
  if (state && about.backbones.includes(state.backbone)) $("backbone").value = state.backbone;
  const heads = state ? state.heads : [about.default, "nn"];
  for (const box of document.querySelectorAll("#heads input")) box.checked = heads.includes(box.value);
}

// A picture dropped beside a field should not replace the page.
window.addEventListener("dragover", event => event.preventDefault());
window.addEventListener("drop", event => event.preventDefault());

ask("/about").then(async answer => {
  about = answer;
  $("backbone").append(...about.backbones.map(name => make("option", {value: name, title: name}, name.split(/[\\/]/).pop())));
  $("backbone").onchange = () => {
    for (const picture of [...classes.flatMap(each => each.pictures), ...queries]) picture.why = null;
    changed();
  };
  $("heads").append(...about.heads.map(head => {
    const box = make("input", {type: "checkbox", value: head, className: "hidden"});
    box.onchange = changed;
    return make("label", {className: "chip"}, box, head);
  }));
  const state = await stored("readonly", page => page.get("state"));
  restore(state && state.run === about.run ? state : null);
  changed();
}).catch(error => say(error.message, true));
