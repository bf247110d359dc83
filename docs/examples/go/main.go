// Submit requests to a pool's queue and print their results, by the queue contract alone.
//
//	go run . 'batch:{qwen}:requests' 600 < requests.jsonl
//
// Each line of standard input is the body of a request, which is to be answered within 600 seconds. Each result is
// printed as it comes: one line of JSON, with the request's id. Ctrl-C cancels what is pending. REDIS_URL says where
// Redis is. Exit code 0: all were answered with a status below 400; 1: some were not; 2: nothing was submitted.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	grace   = 30 * time.Second // a dispatcher answers what is past its deadline within seconds; without one, nobody does
	oneCall = 500              // requests
)

// producer submits to one queue, and awaits the results in a list of its own.
type producer struct {
	redis    *redis.Client
	queue    string
	prefix   string
	run      string
	results  string
	pending  map[string]string // id -> token
	deadline time.Time
	count    int
	made     int64
}

// result has the fields of a result that a program decides by; the rest of it is passed on as it came.
type result struct {
	ID           string `json:"id"`
	RequestToken string `json:"request_token"`
	StatusCode   int    `json:"status_code"`
	ErrorCode    string `json:"error_code"`
	raw          string
}

func newProducer(client *redis.Client, queue string) *producer {
	prefix, run := queue, randomHex(8)
	if !strings.Contains(queue, "{") {
		prefix = "{" + queue + "}"
	}
	return &producer{
		redis: client, queue: queue, prefix: prefix, run: run,
		results: "batch-results:{" + run + "}", pending: map[string]string{},
	}
}

func (p *producer) submit(ctx context.Context, bodies [][]byte, within time.Duration) error {
	p.deadline = time.Unix(time.Now().Add(within).Unix(), 0)
	for len(bodies) > 0 {
		some := bodies[:min(oneCall, len(bodies))]
		bodies = bodies[len(some):]
		members := make([]redis.Z, 0, len(some))
		for _, body := range some {
			members = append(members, redis.Z{Score: float64(p.deadline.Unix()), Member: p.member(body)})
		}
		if err := p.redis.ZAdd(ctx, p.queue, members...).Err(); err != nil {
			return err
		}
		// Only to be quick: without it a dispatcher looks by itself, so that a Redis that goes away now does no harm.
		p.redis.Publish(ctx, p.prefix+":wake", "work")
	}
	return nil
}

// member has `internal` first and the token first in it: requests of one deadline leave in this order. The body is put
// in as it is (json.Marshal would rewrite some of it), so it reaches the model server byte for byte.
func (p *producer) member(body []byte) string {
	p.count++
	id, token := fmt.Sprintf("%s-%d", p.run, p.count), p.token()
	p.pending[id] = token
	return fmt.Sprintf(
		`{"internal":{"request_token":%q,"result_queue_name":%q},"request_kind":"redis",`+
			`"data":{"id":%q,"created":%d,"deadline":%d,"payload":%s}}`,
		token, p.results, id, time.Now().Unix(), p.deadline.Unix(), body)
}

// token is a time that only grows, for the order, and 128 random bits that nobody can guess.
func (p *producer) token() string {
	p.made = max(p.made+1, time.Now().UnixNano())
	return fmt.Sprintf("%016x%s", p.made, randomHex(16))
}

// nextResult is the next result of a request of ours; nil: none came within a second.
func (p *producer) nextResult(ctx context.Context) (*result, error) {
	popped, err := p.redis.BRPop(ctx, time.Second, p.results).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	found := result{raw: popped[1]}
	if json.Unmarshal([]byte(found.raw), &found) != nil {
		return nil, nil
	}
	if token, ours := p.pending[found.ID]; !ours || found.RequestToken != token {
		return nil, nil // whoever knows our list may write to it, but not with our token
	}
	delete(p.pending, found.ID)
	return &found, nil
}

// cancel asks for all that is pending to be cancelled. Each still gets a result: CANCELLED, or what came before.
func (p *producer) cancel(ctx context.Context) error {
	ttl := max(time.Second, time.Until(p.deadline).Round(time.Second))
	_, err := p.redis.Pipelined(ctx, func(calls redis.Pipeliner) error {
		for id, token := range p.pending {
			calls.Set(ctx, fmt.Sprintf("%s:cancel:%s:%s", p.prefix, id, token), token, ttl)
		}
		calls.Publish(ctx, p.prefix+":wake", "cancel")
		return nil
	})
	return err
}

func run(queue string, within time.Duration) int {
	bodies, err := read(os.Stdin)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%v; nothing was submitted\n", err)
		return 2
	}
	url := os.Getenv("REDIS_URL")
	if url == "" {
		url = "redis://127.0.0.1:6379"
	}
	options, err := redis.ParseURL(url)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	askedToEnd, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(askedToEnd, stop) // a second signal ends it at once
	ctx := context.Background()         // a pop that is broken off could lose what it popped
	client := redis.NewClient(options)
	defer client.Close()

	p := newProducer(client, queue)
	if err := p.submit(ctx, bodies, within); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	failed, until, cancelled := 0, p.deadline.Add(grace), false
	for len(p.pending) > 0 && time.Now().Before(until) {
		var found *result
		var err error
		if askedToEnd.Err() != nil && !cancelled {
			if err = p.cancel(ctx); err == nil {
				cancelled = true
				if soon := time.Now().Add(grace); soon.Before(until) {
					until = soon
				}
			}
		}
		if err == nil {
			found, err = p.nextResult(ctx)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "Redis is away: %v\n", err)
			time.Sleep(time.Second)
			continue
		}
		if found != nil {
			fmt.Println(found.raw)
			if found.ErrorCode != "" || found.StatusCode == 0 || found.StatusCode >= 400 {
				failed++
			}
		}
	}
	for id := range p.pending {
		fmt.Fprintf(os.Stderr, "%s: no result; does a dispatcher work on %s?\n", id, queue)
	}
	client.Del(ctx, p.results)
	if failed > 0 || len(p.pending) > 0 {
		return 1
	}
	return 0
}

// read returns the lines that are not blank, each a JSON object.
func read(input io.Reader) ([][]byte, error) {
	var bodies [][]byte
	lines := bufio.NewScanner(input)
	lines.Buffer(nil, 64<<20)
	for number := 1; lines.Scan(); number++ {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		if line[0] != '{' || !json.Valid(line) {
			return nil, fmt.Errorf("line %d is no JSON object", number)
		}
		bodies = append(bodies, bytes.Clone(line))
	}
	return bodies, lines.Err()
}

func randomHex(count int) string {
	random := make([]byte, count)
	if _, err := rand.Read(random); err != nil {
		panic(err) // without chance no token is a secret
	}
	return hex.EncodeToString(random)
}

func main() {
	if len(os.Args) == 3 {
		if seconds, err := strconv.Atoi(os.Args[2]); err == nil && seconds > 0 {
			os.Exit(run(os.Args[1], time.Duration(seconds)*time.Second))
		}
	}
	fmt.Fprintln(os.Stderr, "usage: submit QUEUE SECONDS < requests.jsonl")
	os.Exit(2)
}
