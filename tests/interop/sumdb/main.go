// Command sumdb judges what Acclimate signs and proves with golang.org/x/mod/sumdb, unchanged, and proves in its turn.
//
// Each line of standard input is a JSON object; each gets a line in answer, {"ok": bool, "why": text, ...}.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type question struct {
	Ask    string   // note, inclusion, consistency, tree
	Note   string   // a signed note
	Vkey   string   // who must have signed it
	Size   int64    // of the (newer) tree
	Root   []byte   // of the (newer) tree
	First  int64    // an older tree's size, or an entry's index
	Older  []byte   // the older tree's root
	Entry  []byte   // the entry's bytes
	Proof  [][]byte // 32 bytes each
	Leaves [][]byte // the entries of a tree
}

type answer struct {
	OK    bool     `json:"ok"`
	Why   string   `json:"why"`
	Text  string   `json:"text"`
	Size  int64    `json:"size"`
	Root  []byte   `json:"root"`
	Proof [][]byte `json:"proof"`
}

func hash(data []byte) (h tlog.Hash) {
	copy(h[:], data)
	return
}

func hashes(list [][]byte) (result []tlog.Hash) {
	for _, data := range list {
		result = append(result, hash(data))
	}
	return
}

func bytesOf(list []tlog.Hash) [][]byte {
	result := [][]byte{}
	for _, h := range list {
		data := h
		result = append(result, data[:])
	}
	return result
}

func judge(q question) (a answer, err error) {
	switch q.Ask {
	case "note":
		verifier, err := note.NewVerifier(q.Vkey)
		if err != nil {
			return a, err
		}
		opened, err := note.Open([]byte(q.Note), note.VerifierList(verifier))
		if err != nil {
			return a, err
		}
		a.Text = opened.Text
	case "inclusion":
		return a, tlog.CheckRecord(hashes(q.Proof), q.Size, hash(q.Root), q.First, tlog.RecordHash(q.Entry))
	case "consistency":
		return a, tlog.CheckTree(hashes(q.Proof), q.Size, hash(q.Root), q.First, hash(q.Older))
	case "tree":
		return build(q)
	default:
		return a, fmt.Errorf("unknown question %q", q.Ask)
	}
	return a, nil
}

// build makes the tree over the leaves; its root, the proof of entry First in it, and the proof from size First+1.
func build(q question) (a answer, err error) {
	var stored []tlog.Hash
	reader := tlog.HashReaderFunc(func(indexes []int64) (found []tlog.Hash, err error) {
		for _, index := range indexes {
			found = append(found, stored[index])
		}
		return found, nil
	})
	for number, leaf := range q.Leaves {
		more, err := tlog.StoredHashes(int64(number), leaf, reader)
		if err != nil {
			return a, err
		}
		stored = append(stored, more...)
	}
	a.Size = int64(len(q.Leaves))
	root, err := tlog.TreeHash(a.Size, reader)
	if err != nil {
		return a, err
	}
	a.Root = root[:]
	record, err := tlog.ProveRecord(a.Size, q.First, reader)
	if err != nil {
		return a, err
	}
	tree, err := tlog.ProveTree(a.Size, q.First+1, reader)
	if err != nil {
		return a, err
	}
	a.Proof = append(bytesOf(record), bytesOf(tree)...)
	return a, nil
}

func main() {
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var q question
		a, err := answer{}, json.Unmarshal(line, &q)
		if err == nil {
			a, err = judge(q)
		}
		a.OK = err == nil
		if err != nil {
			a.Why = err.Error()
		}
		written, _ := json.Marshal(a)
		fmt.Println(string(written))
	}
}
