/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Programs of many small tests: each stands once, with its name, and they run in the order in which
 * they stand. A program with something to set up first defines OWN_MAIN and calls run_tests().
 */
#ifndef ISW_TEST_TESTS_H
#define ISW_TEST_TESTS_H

#include <stdint.h>

#define UNUSED_OK __attribute__((unused))

struct test {
	void (*run)(uint32_t n);
	uint32_t cases, line;
	struct test *next;
};

static struct test *tests;

static inline void add_test(struct test *test)
{
	struct test **at = &tests;

	while (*at && (*at)->line < test->line)
		at = &(*at)->next;
	test->next = *at;
	*at = test;
}

/* A test that runs once for each n below `count`. */
#define TEST_CASES(name, count, n)                                                                 \
	static void name(uint32_t n);                                                              \
	__attribute__((constructor)) static void add_##name(void)                                  \
	{                                                                                          \
		static struct test test = {.run = name, .cases = count, .line = __LINE__};         \
		add_test(&test);                                                                   \
	}                                                                                          \
	static void name(UNUSED_OK uint32_t n)
#define TEST(name) TEST_CASES(name, 1, only)

UNUSED_OK static int run_tests(void)
{
	for (const struct test *test = tests; test; test = test->next)
		for (uint32_t n = 0; n < test->cases; n++)
			test->run(n);
	return 0;
}

#ifndef OWN_MAIN
int main(void)
{
	return run_tests();
}
#endif

#endif
