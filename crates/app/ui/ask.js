// @ts-check
/**
 * One question at a time. A new question cancels the one under way, and an answer that comes too late is dropped, so what
 * is shown always belongs to what was asked last.
 */

/** How long an answer may take before the page says that it is computing. */
const SLOW_MS = 150;

export class Asker {
  /** @type {AbortController | null} */
  #running = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #slow;

  /** @param {(slow: boolean) => void} onSlow */
  constructor(onSlow) {
    this.onSlow = onSlow;
  }

  /**
   * Runs `work`; what it does after a newer question was asked must not be seen, so it checks the signal after each wait
   * (`fetch` does so by itself).
   * @param {(signal: AbortSignal) => Promise<void>} work
   */
  async ask(work) {
    this.#running?.abort();
    const controller = new AbortController();
    this.#running = controller;
    clearTimeout(this.#slow);
    this.#slow = setTimeout(() => this.onSlow(true), SLOW_MS);
    try {
      await work(controller.signal);
    } catch (error) {
      if (!controller.signal.aborted) throw error;
    } finally {
      if (this.#running === controller) {
        this.#running = null;
        clearTimeout(this.#slow);
        this.onSlow(false);
      }
    }
  }
}
