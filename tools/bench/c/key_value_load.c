/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client of memcached and of Redis that measures percentiles and checks every answer.
 *
 *     isw-bench-key-value-load --socket PATH [--protocol memcached|resp] [--bytes N]
 *                              [--mix etc|sys] [--run-ms N] [--connections N]
 *
 * Stores items until their values take --bytes, then asks on all connections at once, on each as
 * soon as the answer to the last question is there. The mixes and the sizes of values follow
 * Atikoglu, Xu, Frachtenberg, Jiang, Paleczny, "Workload analysis of a large-scale key-value
 * store", SIGMETRICS 2012, as the paper on Infiniswap used them: of ETC 95 of a hundred requests
 * are GET and values have a generalized Pareto distribution (location 0, scale 214.476, shape
 * 0.348238), cut off at a page; of SYS 75 are GET, and values have 320 to 500 bytes. Keys are
 * chosen by Zipf's law with exponent 0.99. Half of each value is random. A SET stores the value
 * that the key already has.
 *
 * The client locks its memory: in a cgroup it is the server's that is swapped out.
 */
#define _GNU_SOURCE 1
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "bench.h"

#define VALUE_MAX       4096u
#define KEY_CHARS       30
#define CONNECTIONS_MAX 256u
#define BATCH           65536u /* of what is sent at once while storing */
#define STACK_BYTES     (256u << 10)
#define ZIPF_EXPONENT   0.99
#define WARM_MS         1000u
/* A histogram with 64 steps for each power of two: an error of 1.6 %. */
#define STEPS_BITS 6
#define STEPS      (1u << STEPS_BITS)
#define COUNTERS   (40u * STEPS)

struct zipf {
	uint64_t items;
	double alpha, eta, zeta, zeta2;
};

/* A server's language. All functions are required and wait for nothing. Those that make text return
 * its length. */
struct protocol {
	const char *name, *stored, *missing; /* whole answers to SET and to GET */
	/* Stores a value; without `reply` the server does not answer. */
	size_t (*set)(char *text, const char *key, const char *value, size_t bytes, bool reply);
	size_t (*get)(char *text, const char *key);
	/* The answer to GET. */
	size_t (*answer)(char *text, const char *key, const char *value, size_t bytes);
	bool (*is_whole)(const char *answer, size_t used);
};

struct load {
	const struct protocol *protocol;
	const char *path;
	bool is_sys;
	uint64_t get_percent, items, from_ns, until_ns;
	struct zipf zipf;
};

struct connection {
	const struct load *load;
	pthread_t thread;
	int fd;
	uint64_t random;
	uint64_t operations, wrong, missing;
	uint64_t counters[COUNTERS];
	char sent[VALUE_MAX + 256], got[VALUE_MAX + 256];
};

/* ----------------------------------------------------------------------- items */

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
static uint64_t mixed(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static double unit(uint64_t random)
{
	return (double)(random >> 11) * 0x1p-53;
}

static size_t value_bytes(const struct load *load, uint64_t item)
{
	uint64_t random = mixed(item ^ 0x5157ull);
	double bytes;

	if (load->is_sys)
		return 320 + random % 181;
	bytes = 214.476 / 0.348238 * (pow(1.0 - unit(random), -0.348238) - 1.0);
	return (size_t)fmin(fmax(bytes, 1.0), VALUE_MAX);
}

/* Returns its length. */
static size_t make_value(const struct load *load, uint64_t item, char *value)
{
	size_t bytes = value_bytes(load, item);
	uint64_t word = item;

	memset(value, 'x', bytes);
	for (size_t at = 0; at + sizeof(word) <= bytes / 2; at += sizeof(word)) {
		word = mixed(word);
		memcpy(value + at, &word, sizeof(word));
	}
	return bytes;
}

static void make_key(uint64_t item, char *key)
{
	snprintf(key, KEY_CHARS + 1, "isw:%0*llu", KEY_CHARS - 4, (unsigned long long)item);
}

/* The command that stores an item; returns its length. */
static size_t make_set(const struct load *load, uint64_t item, bool reply, char *text)
{
	char key[KEY_CHARS + 1], value[VALUE_MAX];
	size_t bytes = make_value(load, item, value);

	make_key(item, key);
	return load->protocol->set(text, key, value, bytes, reply);
}

/* The whole answer to GET; returns its length. */
static size_t make_answer(const struct load *load, uint64_t item, char *text)
{
	char key[KEY_CHARS + 1], value[VALUE_MAX];
	size_t bytes = make_value(load, item, value);

	make_key(item, key);
	return load->protocol->answer(text, key, value, bytes);
}

/* ------------------------------------------------------------------- protocols */

/* Puts a value and what follows it behind the `head` bytes of text; returns the whole length. */
static size_t append(char *text, int head, const char *value, size_t bytes, const char *end)
{
	memcpy(text + head, value, bytes);
	memcpy(text + head + bytes, end, strlen(end));
	return (size_t)head + bytes + strlen(end);
}

static bool ends_with(const char *data, size_t used, const char *end)
{
	size_t bytes = strlen(end);

	return used >= bytes && !memcmp(data + used - bytes, end, bytes);
}

static size_t memcached_set(char *text, const char *key, const char *value, size_t bytes,
			    bool reply)
{
	int head = sprintf(text, "set %s 0 0 %zu%s\r\n", key, bytes, reply ? "" : " noreply");

	return append(text, head, value, bytes, "\r\n");
}

static size_t memcached_get(char *text, const char *key)
{
	return (size_t)sprintf(text, "get %s\r\n", key);
}

static size_t memcached_answer(char *text, const char *key, const char *value, size_t bytes)
{
	int head = sprintf(text, "VALUE %s 0 %zu\r\n", key, bytes);

	return append(text, head, value, bytes, "\r\nEND\r\n");
}

static bool memcached_is_whole(const char *answer, size_t used)
{
	return ends_with(answer, used, "STORED\r\n") || ends_with(answer, used, "END\r\n") ||
	       ends_with(answer, used, "ERROR\r\n") || ends_with(answer, used, "stored\r\n");
}

static size_t resp_set(char *text, const char *key, const char *value, size_t bytes, bool reply)
{
	const char *skip = "*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$4\r\nSKIP\r\n";
	int head = sprintf(text, "%s*3\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%zu\r\n", reply ? "" : skip,
			   strlen(key), key, bytes);

	return append(text, head, value, bytes, "\r\n");
}

static size_t resp_get(char *text, const char *key)
{
	return (size_t)sprintf(text, "*2\r\n$3\r\nGET\r\n$%zu\r\n%s\r\n", strlen(key), key);
}

static size_t resp_answer(char *text, const char *key, const char *value, size_t bytes)
{
	(void)key;
	return append(text, sprintf(text, "$%zu\r\n", bytes), value, bytes, "\r\n");
}

/* A value is as long as the answer says; every other answer is a line. */
static bool resp_is_whole(const char *answer, size_t used)
{
	const char *end = memchr(answer, '\n', used);
	long bytes;

	if (!end)
		return false;
	bytes = answer[0] == '$' ? strtol(answer + 1, NULL, 10) : -1;
	return bytes < 0 || used >= (size_t)(end + 1 - answer) + (size_t)bytes + 2;
}

static const struct protocol PROTOCOLS[] = {
	{"memcached", "STORED\r\n", "END\r\n", memcached_set, memcached_get, memcached_answer,
	 memcached_is_whole},
	{"resp", "+OK\r\n", "$-1\r\n", resp_set, resp_get, resp_answer, resp_is_whole},
};

static const struct protocol *protocol_of(const char *name)
{
	for (size_t i = 0; i < sizeof(PROTOCOLS) / sizeof(PROTOCOLS[0]); i++)
		if (!strcmp(PROTOCOLS[i].name, name))
			return &PROTOCOLS[i];
	bench_die("--protocol %s: there are memcached and resp", name);
}

/* ---------------------------------------------------------------------- chance */

/* Gray, Sundaresan, Englert, Baclawski, Weinberger, "Quickly generating billion-record synthetic
 * databases", SIGMOD 1994. */
static void zipf_init(struct zipf *zipf, uint64_t items)
{
	double zeta = 0;

	for (uint64_t rank = 1; rank <= items; rank++)
		zeta += 1.0 / pow((double)rank, ZIPF_EXPONENT);
	zipf->items = items;
	zipf->zeta = zeta;
	zipf->zeta2 = 1.0 + 1.0 / pow(2.0, ZIPF_EXPONENT);
	zipf->alpha = 1.0 / (1.0 - ZIPF_EXPONENT);
	zipf->eta =
		(1.0 - pow(2.0 / (double)items, 1.0 - ZIPF_EXPONENT)) / (1.0 - zipf->zeta2 / zeta);
}

/* An item; those that are asked for often lie anywhere. */
static uint64_t zipf_draw(const struct zipf *zipf, uint64_t *state)
{
	double u = unit(bench_random(state)), scaled = u * zipf->zeta;
	uint64_t rank;

	if (scaled < 1.0)
		rank = 0;
	else if (scaled < zipf->zeta2)
		rank = 1;
	else
		rank = (uint64_t)((double)zipf->items *
				  pow(zipf->eta * u - zipf->eta + 1.0, zipf->alpha));
	return mixed(rank) % zipf->items;
}

/* ------------------------------------------------------------------------ wire */

static int connected(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (strlen(path) >= sizeof(address.sun_path))
		bench_die("%s: too long a path for a socket", path);
	strcpy(address.sun_path, path);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		bench_die("%s: cannot connect: %m", path);
	return fd;
}

static void send_all(int fd, const char *data, size_t bytes)
{
	while (bytes) {
		ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);

		if (sent <= 0)
			bench_die("the server has gone: %m");
		data += sent;
		bytes -= (size_t)sent;
	}
}

/* Receives one answer; returns its length. */
static size_t receive(const struct protocol *protocol, int fd, char *data, size_t max)
{
	size_t used = 0;

	while (used < max) {
		ssize_t got = recv(fd, data + used, max - used, 0);

		if (got <= 0)
			bench_die("the server has gone: %m");
		used += (size_t)got;
		if (protocol->is_whole(data, used))
			return used;
	}
	bench_die("an answer longer than asked for");
}

static bool is(const char *answer, size_t bytes, const char *wanted)
{
	return bytes == strlen(wanted) && !memcmp(answer, wanted, bytes);
}

/* ---------------------------------------------------------------------- asking */

static void count(struct connection *c, uint64_t ns)
{
	unsigned power = ns < STEPS ? 0 : 63 - (unsigned)__builtin_clzll(ns) - STEPS_BITS + 1;
	uint64_t step = power ? (ns >> (power - 1)) - STEPS : ns;

	c->counters[ISWI_MIN(power * STEPS + step, COUNTERS - 1)]++;
}

/* The lower end of a counter's range. */
static double counter_us(uint64_t at)
{
	uint64_t power = at / STEPS, step = at % STEPS;

	return (power ? (double)((STEPS + step) << (power - 1)) : (double)step) / 1e3;
}

static void get(struct connection *c, uint64_t item)
{
	const struct protocol *protocol = c->load->protocol;
	char key[KEY_CHARS + 1];
	size_t got;

	make_key(item, key);
	send_all(c->fd, c->sent, protocol->get(c->sent, key));
	got = receive(protocol, c->fd, c->got, sizeof(c->got));
	if (is(c->got, got, protocol->missing))
		c->missing++;
	else if (got != make_answer(c->load, item, c->sent) || memcmp(c->got, c->sent, got) != 0)
		c->wrong++;
}

static void set(struct connection *c, uint64_t item)
{
	const struct protocol *protocol = c->load->protocol;
	size_t got;

	send_all(c->fd, c->sent, make_set(c->load, item, true, c->sent));
	got = receive(protocol, c->fd, c->got, sizeof(c->got));
	if (!is(c->got, got, protocol->stored))
		c->wrong++;
}

static void *ask(void *argument)
{
	struct connection *c = argument;
	const struct load *load = c->load;
	uint64_t before_ns = iswi_now_ns(), now_ns;

	while (before_ns < load->until_ns) {
		uint64_t item = zipf_draw(&load->zipf, &c->random);

		if (bench_random(&c->random) % 100 < load->get_percent)
			get(c, item);
		else
			set(c, item);
		now_ns = iswi_now_ns();
		if (before_ns >= load->from_ns) {
			count(c, now_ns - before_ns);
			c->operations++;
		}
		before_ns = now_ns;
	}
	return NULL;
}

static uint64_t store(struct load *load, uint64_t bytes)
{
	static char batch[BATCH + VALUE_MAX + 256];
	char answer[256];
	uint64_t stored = 0, item = 0;
	size_t used = 0, got;
	int fd = connected(load->path);

	while (stored < bytes) {
		stored += value_bytes(load, item);
		used += make_set(load, item++, false, batch + used);
		if (used >= BATCH || stored >= bytes) {
			send_all(fd, batch, used);
			used = 0;
		}
	}
	/* Answered when all before has been done. */
	send_all(fd, batch, make_set(load, 0, true, batch));
	got = receive(load->protocol, fd, answer, sizeof(answer));
	if (!is(answer, got, load->protocol->stored))
		bench_die("the server does not store: %.*s", (int)got, answer);
	close(fd);
	return item;
}

/* ---------------------------------------------------------------------- report */

static double quantile_us(const uint64_t *counters, uint64_t total, double quantile)
{
	uint64_t wanted = (uint64_t)(quantile * (double)total), seen = 0;

	for (uint64_t at = 0; at < COUNTERS; at++) {
		seen += counters[at];
		if (seen > wanted)
			return counter_us(at);
	}
	return 0;
}

static void print(struct connection *connections, uint64_t number, uint64_t items, uint64_t run_ms)
{
	static uint64_t counters[COUNTERS];
	uint64_t operations = 0, wrong = 0, missing = 0;

	for (uint64_t i = 0; i < number; i++) {
		operations += connections[i].operations;
		wrong += connections[i].wrong;
		missing += connections[i].missing;
		for (uint64_t at = 0; at < COUNTERS; at++)
			counters[at] += connections[i].counters[at];
	}
	printf("{\"check\": {\"items\": %llu, \"wrong\": %llu, \"missing\": %llu}, "
	       "\"ops_per_s\": %.1f, \"p50_us\": %.2f, \"p99_us\": %.2f, \"p999_us\": %.2f}\n",
	       (unsigned long long)items, (unsigned long long)wrong, (unsigned long long)missing,
	       (double)operations / ((double)run_ms / 1e3), quantile_us(counters, operations, 0.5),
	       quantile_us(counters, operations, 0.99), quantile_us(counters, operations, 0.999));
}

int main(int argc, char **argv)
{
	struct load load = {.path = bench_option(argc, argv, "socket", NULL)};
	uint64_t bytes = bench_number(argc, argv, "bytes", 64u << 20);
	uint64_t run_ms = bench_number(argc, argv, "run-ms", 5000);
	uint64_t number = bench_number(argc, argv, "connections", 16);
	struct connection *connections = calloc(number, sizeof(*connections));
	pthread_attr_t attributes;

	if (!load.path || !connections || !number || number > CONNECTIONS_MAX || !bytes)
		bench_die("usage: --socket PATH [--protocol memcached|resp] [--bytes N] "
			  "[--mix etc|sys] [--run-ms N] [--connections 1..%u]",
			  CONNECTIONS_MAX);
	bench_die_with_parent();
	load.protocol = protocol_of(bench_option(argc, argv, "protocol", "memcached"));
	load.is_sys = !strcmp(bench_option(argc, argv, "mix", "etc"), "sys");
	load.get_percent = load.is_sys ? 75 : 95;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		bench_die("memory cannot be locked: %m");
	load.items = store(&load, bytes);
	zipf_init(&load.zipf, load.items);
	load.from_ns = iswi_now_ns() + WARM_MS * 1000000ull;
	load.until_ns = load.from_ns + run_ms * 1000000ull;
	for (uint64_t i = 0; i < number; i++) {
		struct connection *c = &connections[i];

		c->load = &load;
		c->random = mixed(i + 1);
		c->fd = connected(load.path);
		if (pthread_create(&c->thread, &attributes, ask, c))
			bench_die("no thread");
	}
	for (uint64_t i = 0; i < number; i++) {
		pthread_join(connections[i].thread, NULL);
		close(connections[i].fd);
	}
	pthread_attr_destroy(&attributes);
	print(connections, number, load.items, run_ms);
	free(connections);
	return 0;
}
