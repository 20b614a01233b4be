// A browser starts no worker from a page that was opened from the disk. There, the worker of the search runs in a frame.
// Its program looks for the name IFrameWorker in its parent, and loads no other scripts while pages are in English.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script src="${new URL(url, location)}"></script>`;
      this.ready = new Promise((done) => this.frame.addEventListener("load", done)).then(() => {
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        return inside;
      });
      document.body.append(this.frame);
    }

    async postMessage(data) {
      (await this.ready).dispatchEvent(new MessageEvent("message", { data }));
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
