/** @file Files that are dropped on the page. */

/**
 * Let files be dropped on an element; text that is dragged goes where it would.
 * @param {HTMLElement} target
 * @param {(file: File) => void} take
 */
export function takeDrops(target, take) {
  const isFile = (event) => event.dataTransfer?.types.includes('Files');
  const mark = (isOver) => (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    target.classList.toggle('dropping', isOver);
  };
  target.addEventListener('dragover', mark(true));
  target.addEventListener('dragleave', mark(false));
  target.addEventListener('drop', (event) => {
    mark(false)(event);
    if (isFile(event)) take(event.dataTransfer.files[0]);
  });
}
