from benchmarks.zoo.run import main  # processes that are started import the functions from there

if __name__ == "__main__":
    main()
