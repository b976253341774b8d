// The line to type into, or to choose a file with, where a server answers.

if (data.ask) {
  at("ask").hidden = false;
  at("ask").querySelector("label").textContent = data.ask.label;
  Object.assign(at("given"), data.ask.accept ? { type: "file", accept: data.ask.accept } : { type: "text", maxLength: data.ask.longest });
  at("ask").onsubmit = async (event) => {
    event.preventDefault();
    const given = data.ask.accept ? at("given").files[0] : at("given").value;
    if (given.size > data.ask.longest) return void (at("said").textContent = `The file has ${given.size} bytes; expected at most ${data.ask.longest}.`);
    at("send").disabled = true;
    at("said").textContent = "Reading …";
    try {
      const options = { method: "POST", body: given, headers: { "X-Name": encodeURIComponent(given.name ?? "") } };
      const answer = await (await fetch("read", options)).json();
      if (answer.error) at("said").textContent = answer.error;
      else page.open(page.views.push(...answer.views.map(opened)) - 1);
    } catch {
      at("said").textContent = "The server does not answer; is it still running?";
    }
    at("send").disabled = false;
  };
}
if (page.views.length) page.open(0);
else at("tools").hidden = at("stage").hidden = true;
